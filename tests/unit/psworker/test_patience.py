"""How long a request goes on, by a clock of the test's own."""

import logging

import pytest

from pscommon.core.errors import FencedError, UnreachableError, WaitTimeoutError
from psworker.connection.retry import PendingRequests, RetryDeadline, TimeLimits
from psworker.core.clock import Clock
from psworker.session.drain import DrainedError

SILENT = UnreachableError("shard 1 at a:1 does not answer", "UNREACHABLE")
WAITS = "request_waiting request=push 7 waiting_for=worker 2"


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


def fail_for_ever(deadline: RetryDeadline, error: UnreachableError = SILENT) -> None:
    while True:
        deadline.handle_failure(error)


@pytest.fixture
def time() -> Time:
    return Time()


def test_requests_are_retried_for_connect_seconds_with_growing_pauses(time: Time) -> None:
    deadline = RetryDeadline("push 7", time.clock(), TimeLimits(connect=10, wait=5))
    with pytest.raises(UnreachableError, match=r"a:1 does not answer \(tried for 1. s\)") as caught:
        fail_for_ever(deadline)

    assert type(caught.value) is UnreachableError
    assert 110 <= time.now < 110.6
    assert time.pauses[:3] == [0.05, 0.1, 0.2]
    assert max(time.pauses) == 0.25


def test_a_request_that_is_made_anew_again_and_again_does_not_say_each_time_that_it_fails(
    time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    """During a reshard a request to a removed server restarts with each discovery."""
    caplog.set_level(logging.INFO)
    limits = TimeLimits(connect=60, wait=60)
    for _ in range(200):
        RetryDeadline("push 7", time.clock(), limits).handle_failure(SILENT)
    RetryDeadline("push 8", time.clock(), limits).handle_failure(SILENT)

    assert time.now == pytest.approx(110.05)
    assert [record.__dict__["request"] for record in caplog.records] == [
        "push 7",
        "push 7",
        "push 8",
    ]


def test_an_answer_ends_the_silence(time: Time) -> None:
    deadline = RetryDeadline("push 7", time.clock(), TimeLimits(connect=10, wait=1000))
    for _ in range(5):
        time.now += 9
        deadline.handle_failure(SILENT)
        deadline.handle_wait("worker 2")
    assert deadline.ask(lambda: 3) == 3
    time.now += 9
    deadline.handle_failure(SILENT)


def test_a_server_that_takes_more_than_it_ever_did_is_not_silent(time: Time) -> None:
    """However long that takes: on a slow line, or for a large model."""
    deadline = RetryDeadline("push 7", time.clock(), TimeLimits(connect=10, wait=1000))
    deadline.begin_attempt()
    for _ in range(5):
        time.now += 9
        deadline.record_frame()
    time.now += 9
    deadline.handle_failure(SILENT)

    def take_as_much_and_die() -> None:
        deadline.begin_attempt()
        for _ in range(5):
            time.now += 1
            deadline.record_frame()
        deadline.handle_failure(SILENT)

    with pytest.raises(UnreachableError, match=r"tried for 1. s"):
        take_as_much_and_die()


def test_wait_counts_from_the_start_or_the_last_progress(time: Time) -> None:
    deadline = RetryDeadline("push 7", time.clock(), TimeLimits(connect=10, wait=60))
    time.now += 59
    deadline.handle_wait("worker 2")
    deadline.restart()
    time.now += 59
    deadline.handle_wait("worker 2")
    assert deadline.next_wait_seconds(5) == 1
    time.now += 1
    assert deadline.next_wait_seconds(5) == 0
    with pytest.raises(WaitTimeoutError, match="push 7 waited 60 s for worker 2"):
        deadline.handle_wait("worker 2")


def test_a_server_that_is_not_ready_answers_and_so_is_waited_for(time: Time) -> None:
    deadline = RetryDeadline("push 7", time.clock(), TimeLimits(connect=1, wait=60))
    with pytest.raises(
        WaitTimeoutError, match="push 7 waited 60 s for a server that is not ready: no model yet"
    ):
        fail_for_ever(deadline, UnreachableError("no model yet", "NOT_READY"))

    assert 160 <= time.now < 161
    assert min(time.pauses) > 0


def test_servers_answer_a_request_before_its_retry_deadline(time: Time) -> None:
    assert (
        RetryDeadline("push 7", time.clock(), TimeLimits(connect=2, wait=60)).next_wait_seconds(5)
        == 1
    )


def test_ask_repeats_silence_and_lateness(time: Time) -> None:
    answers = iter([SILENT, WaitTimeoutError("worker 2 is late", "WAIT_TIMEOUT"), "here"])

    def call() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert RetryDeadline("x", time.clock(), TimeLimits(connect=10, wait=10)).ask(call) == "here"


def test_waiting_is_logged_before_ten_seconds_are_over(
    time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    deadline = RetryDeadline("push 7", time.clock(), TimeLimits(connect=10, wait=1000))
    with caplog.at_level(logging.INFO, "psworker"):
        for _ in range(31):
            time.now += 1
            deadline.handle_wait("worker 2")

    assert caplog.messages == [WAITS] * 3


def test_server_that_does_not_wait_is_not_flooded(time: Time) -> None:
    deadline = RetryDeadline("push 7", time.clock(), TimeLimits(connect=10, wait=1000))
    deadline.next_wait_seconds(5)
    deadline.handle_wait("worker 2")
    deadline.next_wait_seconds(5)
    time.now += 5
    deadline.handle_wait("worker 2")
    deadline.next_wait_seconds(0)
    deadline.handle_wait("worker 2")

    assert time.pauses == [0.05]


def test_no_point_in_going_on(time: Time) -> None:
    def check() -> None:
        raise FencedError("worker 3 is out")

    deadline = RetryDeadline("push 7", time.clock(), TimeLimits(connect=10, wait=1000, check=check))
    for go_on in (
        lambda: deadline.handle_wait("worker 2"),
        lambda: deadline.handle_failure(SILENT),
    ):
        with pytest.raises(FencedError):
            go_on()


def test_job_that_ends_is_not_worth_waiting_for(time: Time) -> None:
    deadline = RetryDeadline(
        "push 7", time.clock(), TimeLimits(connect=60, wait=1000, hurry=lambda: True)
    )
    with pytest.raises(DrainedError):
        fail_for_ever(deadline)

    assert time.now < 104


def test_pauses_end_where_the_wait_has_to(time: Time) -> None:
    """A worker that is to leave by then makes no attempt that lasts longer."""
    deadline = RetryDeadline(
        "push 7", time.clock(), TimeLimits(connect=60, wait=1000, deadline=lambda: 103.0)
    )
    assert deadline.next_wait_seconds(5) == 3
    time.now += 4
    assert deadline.next_wait_seconds(5) == 0


def test_people_are_reminded_of_a_request_that_a_server_sits_on(
    time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    """Before ten seconds are over, as long as it has it; no call that hangs goes without a line."""
    caplog.set_level(logging.INFO, "psworker")
    waits = PendingRequests()
    deadline = RetryDeadline(
        "push 7 of worker 2 on shard 1 at a:1",
        time.clock(),
        TimeLimits(connect=60, wait=1000, waits=waits),
    )
    deadline.begin_attempt()
    for _ in range(25):
        time.now += 1
        waits.remind(time.now)
    deadline.end_attempt()
    time.now += 30
    waits.remind(time.now)

    assert [record.getMessage() for record in caplog.records] == [
        "request_unanswered request=push 7 of worker 2 on shard 1 at a:1 silent_seconds=8",
        "request_unanswered request=push 7 of worker 2 on shard 1 at a:1 silent_seconds=16",
        "request_unanswered request=push 7 of worker 2 on shard 1 at a:1 silent_seconds=24",
    ]


def test_a_request_is_a_wait_only_while_it_is_asked(
    time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "psworker")
    waits = PendingRequests()
    deadline = RetryDeadline("asking", time.clock(), TimeLimits(connect=60, wait=1000, waits=waits))

    def hangs() -> int:
        time.now += 10
        waits.remind(time.now)
        return 3

    assert deadline.ask(hangs) == 3
    time.now += 10
    waits.remind(time.now)
    assert [record.getMessage() for record in caplog.records] == [
        "request_unanswered request=asking silent_seconds=10"
    ]


def test_a_server_that_stops_answering_is_logged_at_once(
    time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for each silence; the next lines have time."""
    caplog.set_level(logging.INFO, "psworker")
    deadline = RetryDeadline("push 7", time.clock(), TimeLimits(connect=60, wait=1000))
    deadline.handle_failure(SILENT)
    deadline.handle_failure(SILENT)
    time.now += 8
    deadline.handle_wait("worker 2")
    deadline.handle_failure(SILENT)

    text = "request_repeated request=push 7 seconds_left=60 problem=shard 1 at a:1 does not answer"
    assert caplog.messages == [text, WAITS, text]


def test_a_reminder_names_whom_the_last_answer_named(
    time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    """Until there is silence instead."""
    caplog.set_level(logging.INFO, "psworker")
    deadline = RetryDeadline("push 7", time.clock(), TimeLimits(connect=60, wait=1000))
    time.now += 5
    deadline.handle_wait("worker 2")
    deadline.begin_attempt()
    time.now += 3
    deadline.remind(time.now)
    deadline.handle_failure(SILENT)
    deadline.begin_attempt()
    time.now += 8
    deadline.remind(time.now)

    assert caplog.messages[0] == WAITS
    assert caplog.messages[2] == "request_unanswered request=push 7 silent_seconds=8"
