"""Waiting that a signal always ends, and that leaves nothing in the midst of something.

A signal handler runs in the main thread. The system may give the signal to any thread of the
process, though, and then CPython does not wake a main thread that waits for a lock without a
time limit: Ctrl-C would seem to do nothing. So the main thread waits in turns this short.

What a handler raises (KeyboardInterrupt, the TimeoutError of an alarm, SystemExit) may come
between any two instructions. In Condition.__enter__, say, the lock that was just taken stays
taken for ever (bugs.python.org/issue29988); a call of gRPC that was just begun never ends, and
whoever closes its channel waits for that. So where the main thread works with others' locks and
calls, such exceptions are `deferred`.
"""

import _signal  # type: ignore[import-not-found]  # the module `signal` makes enums of all numbers, at 30 times the cost
import _thread
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import partial
from types import FrameType, TracebackType
from typing import Any

TURN_SECONDS = 0.2

Handler = Callable[[int, FrameType | None], Any]

_NUMBERS = tuple(map(int, signal.valid_signals()))


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


class deferred:
    """What a signal's handler raises in here calls `stop` with that exception, in another
    thread, which has to make the main thread come out of here soon; there it is raised, whatever
    else came of it. The second exception breaks in.

    The handlers themselves are called as ever. Elsewhere than in the main thread nothing is
    changed.
    """

    def __init__(self, stop: Callable[[BaseException], object]) -> None:
        self._stop = stop
        self._held: BaseException | None = None
        self._replaced: list[tuple[int, Handler, Handler]] = []

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in _NUMBERS:
                if callable(theirs := _signal.getsignal(number)):
                    ours = partial(self._handle, theirs)
                    self._replaced.append((number, theirs, ours))
                    _signal.signal(number, ours)
        except BaseException:
            self._restore()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._restore()
        finally:
            if self._held is not None:
                raise self._held

    def _handle(self, theirs: Handler, number: int, frame: FrameType | None) -> None:
        try:
            theirs(number, frame)
        except BaseException as error:
            if self._held is not None or not self._replaced:
                raise
            self._held = error
            _thread.start_new_thread(self._stop, (error,))  # unlike Thread.start, takes no lock

    def _restore(self) -> None:
        """Every handler, even when one that is back raises meanwhile. A handler may have set
        another one.
        """
        try:
            while self._replaced:
                number, theirs, ours = self._replaced[-1]
                if _signal.getsignal(number) is ours:
                    _signal.signal(number, theirs)
                self._replaced.pop()
        except BaseException:
            self._restore()
            raise
