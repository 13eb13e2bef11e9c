"""How long a request goes on, by a clock of the test's own."""

import logging

import pytest

from pscommon.core.errors import FencedError, UnreachableError, WaitTimeoutError
from psworker.patience import Clock, Limits, Patience

SILENT = UnreachableError("shard 1 at a:1 does not answer", "UNREACHABLE")


class Time:
    """Stands still except for pauses and what a test adds."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def clock(self) -> Clock:
        return Clock(lambda: self.now, self.sleep)


def fail_for_ever(patience: Patience, error: UnreachableError = SILENT) -> None:
    while True:
        patience.failed(error)


@pytest.fixture
def time() -> Time:
    return Time()


def test_silence_is_borne_for_connect_seconds_with_growing_pauses(time: Time) -> None:
    patience = Patience("push 7", time.clock(), Limits(connect=10, wait=5))
    with pytest.raises(UnreachableError, match=r"a:1 does not answer \(tried for 1. s\)") as caught:
        fail_for_ever(patience)

    assert type(caught.value) is UnreachableError
    assert 110 <= time.now < 111.1
    assert time.pauses[:3] == [0.05, 0.1, 0.2]
    assert max(time.pauses) == 1.0


def test_an_answer_ends_the_silence(time: Time) -> None:
    patience = Patience("push 7", time.clock(), Limits(connect=10, wait=1000))
    for _ in range(5):
        time.now += 9
        patience.failed(SILENT)
        patience.waited("worker 2")
    assert patience.ask(lambda: 3) == 3
    time.now += 9
    patience.failed(SILENT)


def test_wait_counts_from_the_start_or_the_last_progress(time: Time) -> None:
    patience = Patience("push 7", time.clock(), Limits(connect=10, wait=60))
    time.now += 59
    patience.waited("worker 2")
    patience.progress()
    time.now += 59
    patience.waited("worker 2")
    assert patience.left(5) == 1
    time.now += 1
    assert patience.left(5) == 0
    with pytest.raises(WaitTimeoutError, match="push 7 waited 60 s for worker 2"):
        patience.waited("worker 2")


def test_a_server_that_is_not_ready_answers_and_so_is_waited_for(time: Time) -> None:
    patience = Patience("push 7", time.clock(), Limits(connect=1, wait=60))
    with pytest.raises(WaitTimeoutError, match="push 7 waited 60 s for a server that is not ready: no model yet"):
        fail_for_ever(patience, UnreachableError("no model yet", "NOT_READY"))

    assert 160 <= time.now < 161
    assert min(time.pauses) > 0


def test_nobody_is_to_hold_a_request_for_longer_than_silence_is_borne(time: Time) -> None:
    assert Patience("push 7", time.clock(), Limits(connect=2, wait=60)).left(5) == 1


def test_ask_repeats_silence_and_lateness(time: Time) -> None:
    answers = iter([SILENT, WaitTimeoutError("worker 2 is late", "WAIT_TIMEOUT"), "here"])

    def call() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert Patience("x", time.clock(), Limits(connect=10, wait=10)).ask(call) == "here"


def test_waiting_is_logged_every_ten_seconds(time: Time, caplog: pytest.LogCaptureFixture) -> None:
    patience = Patience("push 7", time.clock(), Limits(connect=10, wait=1000))
    with caplog.at_level(logging.INFO, "psworker"):
        for _ in range(35):
            time.now += 1
            patience.waited("worker 2")

    assert caplog.messages == ["push 7 waits for worker 2"] * 3


def test_server_that_does_not_wait_is_not_flooded(time: Time) -> None:
    patience = Patience("push 7", time.clock(), Limits(connect=10, wait=1000))
    patience.left(5)
    patience.waited("worker 2")
    patience.left(5)
    time.now += 5
    patience.waited("worker 2")
    patience.left(0)
    patience.waited("worker 2")

    assert time.pauses == [0.05]


def test_no_point_in_going_on(time: Time) -> None:
    def check() -> None:
        raise FencedError("worker 3 is out")

    patience = Patience("push 7", time.clock(), Limits(connect=10, wait=1000, check=check))
    for go_on in (lambda: patience.waited("worker 2"), lambda: patience.failed(SILENT)):
        with pytest.raises(FencedError):
            go_on()


def test_job_that_ends_is_not_worth_waiting_for(time: Time) -> None:
    patience = Patience("push 7", time.clock(), Limits(connect=60, wait=1000, hurry=lambda: True))
    with pytest.raises(UnreachableError):
        fail_for_ever(patience)

    assert time.now < 104
