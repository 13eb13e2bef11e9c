"""Threads that run event loops with a part of the connections each; how work in them waits."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import NamedTuple, TypeVar

from pscommon.core.errors import REASONS, PSError
from pscommon.wire.stream_format import ALIVE_INTERVAL_SECONDS
from pscommon.wire.tls_socket import AnySocket
from psserver.process.identity import ServerIdentity
from psserver.shard.engine import ShardEngine
from psserver.waiting import TaskWaiter

MAX_LOOPS_COUNT = 4

T = TypeVar("T")

Serve = Callable[[AnySocket], tuple["asyncio.Task[None]", Callable[[], None]]]
"""Begins to serve a connection in the event loop that calls it. Returns the task that serves it and
closes it at its end, and what sends a sign of life if the peer waits for an answer.
"""


class EventLoopThread(threading.Thread):
    """One event loop in a daemon thread.

    Attributes:
        loop: The event loop.
    """

    def __init__(self, number: int) -> None:
        super().__init__(name=f"stream-{number}", daemon=True)
        self.loop = asyncio.new_event_loop()
        # signs of life by the task of a connection; only this thread changes them
        self._connections: dict[asyncio.Task[None], Callable[[], None]] = {}

    def run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(self._keep_alive)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def add(self, sock: AnySocket, serve: Serve) -> None:
        """Serve a connection. From any thread."""
        self.loop.call_soon_threadsafe(self._add, sock, serve)

    def end(self) -> None:
        """Close all connections, then end the loop and its thread."""
        self.loop.call_soon_threadsafe(self.loop.create_task, self._end())
        self.join()

    def _add(self, sock: AnySocket, serve: Serve) -> None:
        task, keep_alive = serve(sock)
        self._connections[task] = keep_alive
        task.add_done_callback(self._remove)

    def _remove(self, task: "asyncio.Task[None]") -> None:
        del self._connections[task]
        if not task.cancelled() and (bug := task.exception()) is not None:
            self.loop.call_exception_handler({"message": "a stream failed", "exception": bug})

    def _keep_alive(self) -> None:
        for keep_alive in self._connections.values():
            keep_alive()
        self.loop.call_later(ALIVE_INTERVAL_SECONDS, self._keep_alive)

    async def _end(self) -> None:
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self.loop.stop()


class SocketService(NamedTuple):
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


class SocketWaiter(TaskWaiter):
    """Waits in an event loop. What may block runs in the pool, unless the shard is quick."""

    def __init__(self, service: SocketService) -> None:
        super().__init__(asyncio.get_running_loop())
        self._service = service

    @cached_property
    def may_act_here(self) -> bool:
        """Whether the shard was quick at the first action."""
        return self._service.engine.is_quick

    async def do(
        self, action: Callable[[], T], abandoned: Callable[[T], object] | None = None
    ) -> T:
        if self.may_act_here:
            return action()
        future = self._loop.run_in_executor(self._service.pool, action)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                with suppress(asyncio.CancelledError):  # more than one reason may end the task
                    await asyncio.wait([future])
            # asked for in any case, or asyncio logs a traceback of a failed action
            has_failed = future.exception() is not None
            if abandoned is not None and not has_failed:
                abandoned(future.result())
            raise
