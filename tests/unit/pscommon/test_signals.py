"""A signal delivered to another thread ends each wait of the main thread."""

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import FrameType

import pytest

from pscommon.system import signals as interruptible


class InterruptedByTest(Exception):
    pass


def wait_forever() -> threading.Thread:
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def interrupted() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Call a function while another thread gets a signal whose handler raises here."""

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
        lambda: interruptible.join(wait_forever()),
        lambda: interruptible.settle(Future()),
    ],
    ids=["wait", "join", "settle"],
)
def test_a_signal_to_another_thread_ends_a_wait(
    wait: Callable[[], None], interrupted: Callable[[Callable[[], None]], None]
) -> None:
    with pytest.raises(InterruptedByTest):
        interrupted(wait)


def test_a_completed_wait_returns_at_once() -> None:
    event, future = threading.Event(), Future[int]()
    event.set()
    future.set_exception(ValueError())
    interruptible.wait(event)
    interruptible.settle(future)
    thread = threading.Thread(target=event.wait)
    thread.start()
    interruptible.join(thread)
    assert not thread.is_alive()


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


class InterruptedSteps:
    """Two steps with Ctrl-C between them; steps: the completed ones."""

    def __init__(
        self, stop: Callable[[BaseException], object], between: Callable[[], object] = ctrl_c
    ) -> None:
        self.steps: list[str] = []
        self._stop, self._between = stop, between

    def __call__(self) -> None:
        with interruptible.deferred(self._stop):
            self.steps.append("first")
            self._between()
            self.steps.append("second")


def test_ctrl_c_is_raised_at_the_end_after_another_thread_has_stopped_the_work() -> None:
    stopped, stoppers = threading.Event(), []

    def stop(interrupt: BaseException) -> None:
        stoppers.append((interrupt, threading.current_thread() is threading.main_thread()))
        stopped.set()

    work = InterruptedSteps(stop, lambda: (ctrl_c(), interruptible.wait(stopped)))
    with pytest.raises(KeyboardInterrupt) as caught:
        work()

    assert work.steps == ["first", "second"]
    assert stoppers == [(caught.value, False)]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_precedes_the_error_that_it_caused() -> None:
    work = InterruptedSteps(lambda interrupt: None, lambda: (ctrl_c(), [][0]))
    with pytest.raises(KeyboardInterrupt):
        work()
    assert work.steps == ["first"]


def test_the_second_ctrl_c_is_raised_at_once() -> None:
    work = InterruptedSteps(lambda interrupt: None, lambda: (ctrl_c(), ctrl_c()))
    with pytest.raises(KeyboardInterrupt):
        work()
    assert work.steps == ["first"]


def test_without_ctrl_c_nothing_changes() -> None:
    InterruptedSteps(pytest.fail, InterruptedSteps(pytest.fail, lambda: None))()
    failing = InterruptedSteps(pytest.fail, lambda: [][0])
    with pytest.raises(IndexError):
        failing()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """The numbers of the signals received by a handler that raises after the first."""
    numbers: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        numbers.append(number)
        if len(numbers) > 1:
            raise InterruptedByTest

    before = signal.signal(signal.SIGUSR1, handle)
    yield numbers
    signal.signal(signal.SIGUSR1, before)


def usr1() -> None:
    signal.raise_signal(signal.SIGUSR1)


def test_handlers_run_at_once_and_only_their_exceptions_are_deferred(
    handled: list[int],
) -> None:
    handler, seen = signal.getsignal(signal.SIGUSR1), []
    work = InterruptedSteps(
        lambda cause: None,
        lambda: (usr1(), seen.append(len(handled)), usr1(), seen.append(len(handled))),
    )
    with pytest.raises(InterruptedByTest):
        work()
    assert work.steps == ["first", "second"]
    assert seen == [1, 2]
    assert signal.getsignal(signal.SIGUSR1) is handler


def test_a_handler_set_by_a_handler_stays() -> None:
    before = signal.getsignal(signal.SIGUSR2)

    def for_once(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)

    signal.signal(signal.SIGUSR2, for_once)
    try:
        InterruptedSteps(pytest.fail, lambda: signal.raise_signal(signal.SIGUSR2))()
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_other_threads_are_not_affected() -> None:
    handlers: list[object] = []
    work = InterruptedSteps(pytest.fail, lambda: handlers.append(signal.getsignal(signal.SIGINT)))
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]
