"""Retries and timeouts of a request, with a clock that the test advances."""

import logging
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from pscommon.core.errors import (
    AuthenticationError,
    FencedError,
    UnreachableError,
    WaitTimeoutError,
)
from pscommon.wire.requests import NEXT_BATCH
from psproto.v1 import coordinator_pb2 as co
from psworker.connection.retry import PendingRequests, RetryDeadline, TimeLimits
from psworker.core.clock import Clock
from psworker.session.drain import DrainedError

SILENT = UnreachableError("shard 1 at a:1 does not answer", "UNREACHABLE")
WAITS = "request_waiting request=push 7 waiting_for=worker 2"


class Time:
    """Clock that advances only during pauses and when a test adds seconds."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def lane(self, ask: Callable[..., Any] = lambda *_: 3) -> Any:
        """Return a transport whose requests are answered by `ask`."""
        return Mock(clock=Clock(lambda: self.now, self.sleep), request=ask)


def fail_repeatedly(deadline: RetryDeadline, error: UnreachableError = SILENT) -> None:
    while True:
        deadline.handle_failure(error)


@pytest.fixture
def time() -> Time:
    return Time()


def test_requests_are_retried_until_connect_timeout_with_growing_pauses(time: Time) -> None:
    deadline = RetryDeadline("push 7", time.lane(), TimeLimits(connect=10, wait=5))
    with pytest.raises(UnreachableError, match=r"a:1 does not answer \(tried for 1. s\)") as caught:
        fail_repeatedly(deadline)

    assert type(caught.value) is UnreachableError
    assert 110 <= time.now < 110.6
    assert time.pauses[:3] == [0.05, 0.1, 0.2]
    assert max(time.pauses) == 0.25


def test_restarts_of_one_request_are_not_all_logged(
    time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    """During a reshard a request to a removed server restarts after each discovery."""
    caplog.set_level(logging.INFO)
    limits = TimeLimits(connect=60, wait=60)
    for _ in range(200):
        RetryDeadline("push 7", time.lane(), limits).handle_failure(SILENT)
    RetryDeadline("push 8", time.lane(), limits).handle_failure(SILENT)

    assert time.now == pytest.approx(110.05)
    assert [record.__dict__["request"] for record in caplog.records] == [
        "push 7",
        "push 7",
        "push 8",
    ]


def test_an_answer_restarts_the_connect_timeout(time: Time) -> None:
    deadline = RetryDeadline("push 7", time.lane(), TimeLimits(connect=10, wait=1000))
    for _ in range(5):
        time.now += 9
        deadline.handle_failure(SILENT)
        deadline.handle_wait("worker 2")
    assert deadline.ask(NEXT_BATCH, co.NextBatchRequest()) == 3
    time.now += 9
    deadline.handle_failure(SILENT)


def test_an_attempt_that_sends_more_frames_than_before_is_progress(time: Time) -> None:
    """On a slow link or with a large model, an attempt may take long."""
    deadline = RetryDeadline("push 7", time.lane(), TimeLimits(connect=10, wait=1000))
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


def test_the_wait_timeout_counts_from_the_last_restart(time: Time) -> None:
    deadline = RetryDeadline("push 7", time.lane(), TimeLimits(connect=10, wait=60))
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


def test_a_server_that_is_not_ready_is_awaited_until_wait_timeout(time: Time) -> None:
    deadline = RetryDeadline("push 7", time.lane(), TimeLimits(connect=1, wait=60))
    with pytest.raises(
        WaitTimeoutError, match="push 7 waited 60 s for a server that is not ready: no model yet"
    ):
        fail_repeatedly(deadline, UnreachableError("no model yet", "NOT_READY"))

    assert 160 <= time.now < 161
    assert min(time.pauses) > 0


def test_servers_answer_a_request_before_its_retry_deadline(time: Time) -> None:
    assert (
        RetryDeadline("push 7", time.lane(), TimeLimits(connect=2, wait=60)).next_wait_seconds(5)
        == 1
    )


def test_ask_retries_after_unreachable_and_timeout_errors(time: Time) -> None:
    answers = iter([SILENT, WaitTimeoutError("worker 2 is late", "WAIT_TIMEOUT"), "here"])

    def answer(*_: Any) -> str:
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    deadline = RetryDeadline("x", time.lane(answer), TimeLimits(connect=10, wait=10))
    assert deadline.ask(NEXT_BATCH, co.NextBatchRequest()) == "here"


def test_a_refused_credential_is_not_retried(time: Time) -> None:
    calls: list[object] = []

    def refuse(*arguments: Any) -> str:
        calls.append(arguments)
        raise AuthenticationError("the token is unknown")

    deadline = RetryDeadline("x", time.lane(refuse), TimeLimits(connect=10, wait=10))
    with pytest.raises(AuthenticationError):
        deadline.ask(NEXT_BATCH, co.NextBatchRequest())
    assert len(calls) == 1


def test_a_wait_is_logged_within_ten_seconds(time: Time, caplog: pytest.LogCaptureFixture) -> None:
    deadline = RetryDeadline("push 7", time.lane(), TimeLimits(connect=10, wait=1000))
    with caplog.at_level(logging.INFO, "psworker"):
        for _ in range(31):
            time.now += 1
            deadline.handle_wait("worker 2")

    assert caplog.messages == [WAITS] * 3


def test_requests_to_a_server_that_answers_at_once_are_paused(time: Time) -> None:
    deadline = RetryDeadline("push 7", time.lane(), TimeLimits(connect=10, wait=1000))
    deadline.next_wait_seconds(5)
    deadline.handle_wait("worker 2")
    deadline.next_wait_seconds(5)
    time.now += 5
    deadline.handle_wait("worker 2")
    deadline.next_wait_seconds(0)
    deadline.handle_wait("worker 2")

    assert time.pauses == [0.05]


def test_a_failed_check_ends_the_retries(time: Time) -> None:
    def check() -> None:
        raise FencedError("worker 3 is out")

    deadline = RetryDeadline("push 7", time.lane(), TimeLimits(connect=10, wait=1000, check=check))
    for go_on in (
        lambda: deadline.handle_wait("worker 2"),
        lambda: deadline.handle_failure(SILENT),
    ):
        with pytest.raises(FencedError):
            go_on()


def test_servers_of_an_ending_job_are_awaited_briefly(time: Time) -> None:
    deadline = RetryDeadline(
        "push 7", time.lane(), TimeLimits(connect=60, wait=1000, hurry=lambda: True)
    )
    with pytest.raises(DrainedError):
        fail_repeatedly(deadline)

    assert time.now < 104


def test_attempts_end_at_the_deadline_of_a_drain(time: Time) -> None:
    """No attempt of a draining worker lasts longer than its deadline."""
    deadline = RetryDeadline(
        "push 7", time.lane(), TimeLimits(connect=60, wait=1000, deadline=lambda: 103.0)
    )
    assert deadline.next_wait_seconds(5) == 3
    time.now += 4
    assert deadline.next_wait_seconds(5) == 0


def test_an_unanswered_request_is_logged_every_eight_seconds(
    time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    """From eight seconds on, until the call ends."""
    caplog.set_level(logging.INFO, "psworker")
    waits = PendingRequests()
    deadline = RetryDeadline(
        "push 7 of worker 2 on shard 1 at a:1",
        time.lane(),
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


def test_a_request_is_pending_only_during_its_call(
    time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "psworker")
    waits = PendingRequests()

    def hangs(*_: Any) -> int:
        time.now += 10
        waits.remind(time.now)
        return 3

    limits = TimeLimits(connect=60, wait=1000, waits=waits)
    deadline = RetryDeadline("asking", time.lane(hangs), limits)
    assert deadline.ask(NEXT_BATCH, co.NextBatchRequest()) == 3
    time.now += 10
    waits.remind(time.now)
    assert [record.getMessage() for record in caplog.records] == [
        "request_unanswered request=asking silent_seconds=10"
    ]


def test_the_first_failed_attempt_is_logged_at_once(
    time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    """Each silence is logged once; later lines are rate-limited."""
    caplog.set_level(logging.INFO, "psworker")
    deadline = RetryDeadline("push 7", time.lane(), TimeLimits(connect=60, wait=1000))
    deadline.handle_failure(SILENT)
    deadline.handle_failure(SILENT)
    time.now += 8
    deadline.handle_wait("worker 2")
    deadline.handle_failure(SILENT)

    text = "request_repeated request=push 7 seconds_left=60 problem=shard 1 at a:1 does not answer"
    assert caplog.messages == [text, WAITS, text]


def test_a_reminder_names_the_worker_of_the_last_answer(
    time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    """After a failed attempt it names no worker."""
    caplog.set_level(logging.INFO, "psworker")
    deadline = RetryDeadline("push 7", time.lane(), TimeLimits(connect=60, wait=1000))
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
