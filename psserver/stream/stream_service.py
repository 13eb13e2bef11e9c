"""What the streams of one server share."""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from pscommon.core.errors import REASONS, PSError
from psserver.process.identity import ServerIdentity
from psserver.shard.engine import ShardEngine
from psserver.waiting import TaskWaiter

T = TypeVar("T")


class StreamService(NamedTuple):
    """The shard, and how its streams do their work.

    Attributes:
        engine: The shard.
        identity: Who this server is.
        pool: Threads for work that may wait.
        record: Called with the method, the status code and the seconds of each exchange or
            request.
    """

    engine: ShardEngine
    identity: ServerIdentity
    pool: ThreadPoolExecutor
    record: Callable[[str, str, float], None]

    @contextmanager
    def timing(self, method: str) -> Iterator[None]:
        """Record an exchange or a request that the block answers."""
        began, code = time.perf_counter(), "UNKNOWN"
        try:
            yield
            code = "OK"
        except PSError as error:
            code = REASONS.get(error.reason, REASONS["INTERNAL"]).status
            raise
        except asyncio.CancelledError:
            code = "CANCELLED"
            raise
        finally:
            self.record(method, code, time.perf_counter() - began)


class StreamWaiter(TaskWaiter):
    """Waits in an event loop. What may block runs in the pool, unless the shard is quick now."""

    def __init__(self, service: StreamService) -> None:
        super().__init__(asyncio.get_running_loop())
        self._service = service
        self.may_block = service.engine.is_quick

    async def do(
        self, action: Callable[[], T], abandoned: Callable[[T], object] | None = None
    ) -> T:
        if self.may_block:
            return action()
        future = self._loop.run_in_executor(self._service.pool, action)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            if abandoned is not None and future.exception() is None:
                abandoned(future.result())
            raise
