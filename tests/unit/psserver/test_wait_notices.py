"""Notices about the worker that a step waits for, in time and for each step."""

import logging

import pytest

from pscommon.core.errors import QUARANTINED
from pscommon.core.log_entries import Evict, PushKey, Reject
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.policy import policy
from psserver.core.job.settings import JobRules
from psserver.monitoring.wait_notices import RefusalNotice, WaitNotice
from tests.support.events import event_key

WHOM = "worker 2, silent for 3.0 s"


@pytest.fixture
def coordinator() -> CoordinatorMachine:
    return CoordinatorMachine(1, JobRules(policy("sync")))


def seconds_of(caplog: pytest.LogCaptureFixture) -> list[tuple[int, float]]:
    """Return step and seconds of each line."""
    return [(record.__dict__["step"], record.__dict__["seconds"]) for record in caplog.records]


def test_a_wait_is_logged_within_ten_seconds_and_repeated(
    coordinator: CoordinatorMachine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "psserver")
    notice = WaitNotice(100.0)
    for second in range(101, 121):
        notice.update(coordinator, WHOM, second)

    assert seconds_of(caplog) == [(1, 8), (1, 16)]
    assert caplog.records[0].__dict__["waiting_for"] == WHOM


def test_another_step_or_no_awaited_worker_restarts_the_wait(
    coordinator: CoordinatorMachine, caplog: pytest.LogCaptureFixture
) -> None:
    """A job that is slow but makes progress logs nothing."""
    caplog.set_level(logging.INFO, "psserver")
    notice = WaitNotice(100.0)
    for second in range(101, 121):
        coordinator.job.version = second // 7
        notice.update(coordinator, WHOM, second)
    for second in range(121, 141):
        notice.update(coordinator, "" if second % 5 else WHOM, second)

    assert seconds_of(caplog) == []


def test_a_refused_push_is_logged_once_a_second_and_a_quarantine_always(
    caplog: pytest.LogCaptureFixture,
) -> None:
    notice = RefusalNotice()

    def refused(seq: int, now: float, reason: str = "NON_FINITE") -> None:
        notice.update([Reject(seq, PushKey(7, seq), reason, "worker 7: tensor w")], now)

    refused(1, 10.0)
    refused(2, 10.5)
    refused(3, 10.6)
    refused(4, 10.7, "STALE")
    refused(5, 11.1)
    notice.update(
        [Evict(6, 7, f"{QUARANTINED} after 3 bad gradients"), Evict(7, 8, "it left the job")], 11.2
    )

    notices = [
        (r.levelname, event_key(r), r.__dict__["worker"], r.__dict__.get("suppressed"))
        for r in caplog.records
    ]
    assert notices == [
        ("WARNING", "push_refused", 7, 0),
        ("WARNING", "push_refused", 7, 2),
        ("WARNING", "worker_quarantined", 7, None),
    ]
    assert caplog.records[0].__dict__["detail"] == "worker 7: tensor w"
