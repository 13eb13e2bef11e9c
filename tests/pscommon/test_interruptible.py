"""A signal that the system gives to another thread ends each of the waits of the main thread."""

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import FrameType

import pytest

from pscommon import interruptible


class InterruptedByTest(Exception):
    pass


def for_ever() -> threading.Thread:
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def disturbed() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Calls a function, during which a thread beside this one gets a signal, whose handler raises here."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise InterruptedByTest

    before = signal.signal(signal.SIGUSR1, handle)
    timer = threading.Timer(0.3, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGUSR1))
    yield lambda call: (timer.start(), call())[1]
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    "wait",
    [
        lambda: interruptible.wait(threading.Event()),
        lambda: interruptible.join(for_ever()),
        lambda: interruptible.settle(Future()),
    ],
    ids=["wait", "join", "settle"],
)
def test_a_signal_that_another_thread_gets_ends_a_wait(
    wait: Callable[[], None], disturbed: Callable[[Callable[[], None]], None]
) -> None:
    with pytest.raises(InterruptedByTest):
        disturbed(wait)


def test_what_has_ended_is_not_waited_for() -> None:
    event, future = threading.Event(), Future[int]()
    event.set()
    future.set_exception(ValueError())
    interruptible.wait(event)
    interruptible.settle(future)
    thread = threading.Thread(target=event.wait)
    thread.start()
    interruptible.join(thread)
    assert not thread.is_alive()
