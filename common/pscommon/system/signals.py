"""Waiting that signals can interrupt, and exceptions of signal handlers at safe points only.

A signal handler runs in the main thread. The system may deliver the signal to any thread, and
CPython does not wake a main thread that waits for a lock without a timeout: Ctrl-C would have no
effect. So the main thread waits in turns of TURN_SECONDS.

An exception of a handler (KeyboardInterrupt, TimeoutError of an alarm, SystemExit) may occur
between any two instructions. In Condition.__enter__, a lock just acquired is never released
(bugs.python.org/issue29988). A gRPC call just started never ends, and closing its channel
blocks. `deferred` postpones such exceptions while the main thread uses shared locks and calls.
"""

import _signal  # type: ignore[import-not-found]  # `signal` makes enums: 30 times slower
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

# real-time signals do not end programs, and asking for their handlers would take half of the time
_NUMBERS = tuple(number for number in signal.valid_signals() if number < signal.SIGRTMIN)


def wait(event: threading.Event) -> None:
    """Wait for an event."""
    while not event.wait(TURN_SECONDS):
        pass


def join(thread: threading.Thread) -> None:
    """Wait for the end of a thread."""
    while thread.is_alive():
        thread.join(TURN_SECONDS)


def settle(future: "Future[Any]") -> None:
    """Wait until a future is done; never raise its exception."""
    while not future.done():
        with suppress(FutureTimeoutError):
            future.exception(TURN_SECONDS)


class deferred:
    """Context in which an exception of a signal handler is postponed to the exit.

    On the first exception, another thread calls `stop` with it; `stop` has to make the block end
    soon. A second exception is raised at once. In threads other than the main thread the context
    has no effect.
    """

    def __init__(self, stop: Callable[[BaseException], object]) -> None:
        self._stop = stop
        self._deferred_error: BaseException | None = None
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
            if self._deferred_error is not None:
                raise self._deferred_error

    def _handle(self, theirs: Handler, number: int, frame: FrameType | None) -> None:
        try:
            theirs(number, frame)
        except BaseException as error:
            if self._deferred_error is not None or not self._replaced:
                raise
            self._deferred_error = error
            _thread.start_new_thread(self._stop, (error,))  # unlike Thread.start, takes no lock

    def _restore(self) -> None:
        """Restore every handler, even if a restored one raises; keep handlers set meanwhile."""
        try:
            while self._replaced:
                number, theirs, ours = self._replaced[-1]
                if _signal.getsignal(number) is ours:
                    _signal.signal(number, theirs)
                self._replaced.pop()
        except BaseException:
            self._restore()
            raise
