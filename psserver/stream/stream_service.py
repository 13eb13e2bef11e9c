"""What the streams of one server share."""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from pscommon.core.errors import REASONS, PSError
from psserver.shard.engine import ShardEngine
from psserver.transfer.exchange_steps import ExchangeSteps

T = TypeVar("T")


class StreamService(NamedTuple):
    """The shard, and how its streams do their work.

    Attributes:
        engine: The shard.
        steps: The steps of an exchange.
        pool: Threads for work that may wait.
        record: Called with the method, the status code and the seconds of each exchange or
            request.
    """

    engine: ShardEngine
    steps: ExchangeSteps
    pool: ThreadPoolExecutor
    record: Callable[[str, str, float], None]

    async def do(
        self, action: Callable[[], T], abandoned: Callable[[T], object] | None = None
    ) -> T:
        """Carry out an action, in the pool if it may take long. It always runs to its end.

        abandoned: called with the result if the stream is closed meanwhile.
        """
        if self.engine.is_quick:
            return action()
        future = asyncio.get_running_loop().run_in_executor(self.pool, action)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            if abandoned is not None and future.exception() is None:
                abandoned(future.result())
            raise

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
