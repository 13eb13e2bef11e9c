"""Waiting that a signal always ends, and that leaves nothing in the midst of something.

A signal handler runs in the main thread. The system may give the signal to any thread of the process, though, and then
CPython does not wake a main thread that waits for a lock without a time limit: Ctrl-C would seem to do nothing. So the
main thread waits in turns this short.

A KeyboardInterrupt may come between any two instructions. In Condition.__enter__, say, the lock that was just taken
stays taken for ever (bugs.python.org/issue29988); a call of gRPC that was just begun never ends, and whoever closes its
channel waits for that. So where the main thread works with others' locks and calls, Ctrl-C is `deferred`.
"""

import _thread
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

TURN_SECONDS = 0.2


def wait(event: threading.Event) -> None:
    """event.wait()."""
    while not event.wait(TURN_SECONDS):
        pass


def join(thread: threading.Thread) -> None:
    """thread.join()."""
    while thread.is_alive():
        thread.join(TURN_SECONDS)


def settle(future: "Future[Any]") -> None:
    """Until the future has a result or an exception, neither of which is raised here."""
    while not future.done():
        with suppress(FutureTimeoutError):
            future.exception(TURN_SECONDS)


@contextmanager
def deferred(stop: Callable[[BaseException], object]) -> Iterator[None]:
    """Ctrl-C in here calls `stop` with the KeyboardInterrupt, in another thread, which has to make the main thread come
    out of here soon; there it is raised, whatever else came of it. The second Ctrl-C breaks in.

    Elsewhere than in the main thread, and where Ctrl-C means something else than KeyboardInterrupt, nothing is changed.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupts: list[KeyboardInterrupt] = []

    def defer(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupts.append(KeyboardInterrupt())
        _thread.start_new_thread(stop, (interrupts[0],))  # unlike Thread.start, takes no lock

    signal.signal(signal.SIGINT, defer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupts:
            raise interrupts[0]
