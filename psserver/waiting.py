"""One way to wait, in a thread or in an event loop.

`until` registers a callback, checks, and parks until the callback is called. Only parking differs:
a thread waits for an event, a coroutine in an event loop for a future. So code that waits is
written once, as a coroutine. `run` carries it out in a thread, where its waits block.
"""

import asyncio
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Generic, Protocol, TypeVar

import grpc

K = TypeVar("K")
T = TypeVar("T")

Watch = Callable[[Callable[[], None]], AbstractContextManager[object]]
"""Calls the given function at each change until the block ends. The function never waits."""


class Waiter(Protocol):
    """The one that waits.

    Attributes:
        is_over: Its caller needs no answer any more.
        may_act_here: Actions that may block need no `do`: its thread may carry them out itself.
    """

    @property
    def is_over(self) -> bool: ...

    @property
    def may_act_here(self) -> bool: ...

    def wake(self) -> None:
        """End the current or the next `park`. From any thread; never waits."""

    async def park(self, seconds: float) -> None:
        """Wait for `wake`, at most this time. It may also end early."""

    async def do(
        self, action: Callable[[], T], abandoned: Callable[[T], object] | None = None
    ) -> T:
        """Carry out an action that may block. It always runs to its end.

        abandoned: Called with the result if the wait is cancelled meanwhile.
        """
        ...


async def until(
    done: Callable[[], T | None],
    watch: Watch,
    seconds: float,
    waiter: Waiter,
    interval: float = math.inf,
) -> T | None:
    """Return the first result of `done` that is not None.

    Args:
        done: Called at once and after each change. It must not wait for long. What it raises ends
            the wait.
        watch: Registers a callback for changes of what `done` reads.
        seconds: The longest wait.
        interval: Longest time between two calls of `done`.

    Returns:
        The result; None after `seconds`, or if the waiter is over.
    """
    if (found := done()) is not None:
        return found
    deadline = time.monotonic() + seconds
    with watch(waiter.wake):
        while (found := done()) is None:
            left = deadline - time.monotonic()
            if left <= 0 or waiter.is_over:
                return None
            await waiter.park(min(left, interval))
    return found


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends: its waiter blocks this thread."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        result: T = ended.value
        return result
    coroutine.close()
    raise RuntimeError("the coroutine has suspended: its waiter is not that of a thread")


class ThreadWaiter:
    """A waiter that blocks its thread.

    context: The gRPC call that waits; its end also ends the wait. None: nothing ends it early.
    """

    may_act_here = True

    def __init__(self, context: grpc.ServicerContext | None = None) -> None:
        self._event, self._context = threading.Event(), context
        if context is not None:
            context.add_callback(self._event.set)

    @property
    def is_over(self) -> bool:
        return self._context is not None and not self._context.is_active()

    def wake(self) -> None:
        self._event.set()

    def when_over(self, action: Callable[[], None]) -> None:
        """Call the action when the call has ended, or at once if it has."""
        if self._context is None or not self._context.add_callback(action):
            action()

    async def park(self, seconds: float) -> None:
        self._event.wait(min(seconds, threading.TIMEOUT_MAX))
        self._event.clear()

    async def do(
        self, action: Callable[[], T], abandoned: Callable[[T], object] | None = None
    ) -> T:
        return action()


class TaskWaiter(ABC):
    """A waiter that suspends its task. Created in the thread of the event loop."""

    is_over = False  # the end of its connection cancels the task

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._thread = loop, threading.get_ident()
        self._future: asyncio.Future[None] | None = None
        self._is_woken = False

    def wake(self) -> None:
        if threading.get_ident() == self._thread:
            self._resolve()
        else:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._resolve)

    async def park(self, seconds: float) -> None:
        if not self._is_woken:
            self._future = self._loop.create_future()
            timer = self._loop.call_later(seconds, self._resolve)
            try:
                await self._future
            finally:
                timer.cancel()
                self._future = None
        self._is_woken = False

    @abstractmethod
    async def do(
        self, action: Callable[[], T], abandoned: Callable[[T], object] | None = None
    ) -> T: ...

    def _resolve(self) -> None:
        self._is_woken = True
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


class Registrations(Generic[K]):
    """Functions to call when the thing that a key names may have changed.

    Args:
        lock: Guards the functions. It is held while they run, so they must not wait.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._functions: dict[K, list[Callable[[], None]]] = {}

    @property
    def keys(self) -> list[K]:
        """The things that something waits for."""
        return list(self._functions)

    @contextmanager
    def watch(self, key: K, wake: Callable[[], None]) -> Iterator[None]:
        """Call `wake` for this key until the block ends."""
        with self._lock:
            self._functions.setdefault(key, []).append(wake)
        try:
            yield
        finally:
            with self._lock:
                self._functions[key].remove(wake)
                if not self._functions[key]:
                    del self._functions[key]

    def wake(self, keys: Iterable[K]) -> None:
        """Call the functions of these keys. The lock is held."""
        for key in keys:
            for function in self._functions.get(key, ()):
                function()
