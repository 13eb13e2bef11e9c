"""Waiting that a signal always ends.

A signal handler runs in the main thread. The system may give the signal to any thread of the process, though, and then
CPython does not wake a main thread that waits for a lock without a time limit: Ctrl-C would seem to do nothing. So the
main thread waits in turns this short.
"""

import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
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
