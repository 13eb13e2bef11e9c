"""Waiting of a coroutine for something that another thread does."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress


class Wakeup:
    """Wakes the one coroutine that waits for it. Created in the thread of the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._thread = loop, threading.get_ident()
        self._future: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Let the coroutine look again. From any thread; never waits."""
        if threading.get_ident() == self._thread:
            self._resolve()
        else:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._resolve)

    async def until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Wait until `done` returns True; return False after `seconds`.

        Something must call `wake` after each change of what `done` looks at.
        """
        deadline = self._loop.time() + seconds
        while True:
            self._future = self._loop.create_future()
            if done():
                return True
            left = deadline - self._loop.time()
            if left <= 0:
                return False
            timer = self._loop.call_later(left, self._resolve)
            try:
                await self._future
            finally:
                timer.cancel()

    def _resolve(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)
