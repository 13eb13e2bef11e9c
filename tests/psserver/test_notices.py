"""Whom a step waits for is said in time, for each step anew."""

import logging

import pytest

from psserver.core.coordinator import Coordinator
from psserver.core.policy import policy
from psserver.core.rules import Rules
from psserver.notices import WaitNotice

WHOM = "worker 2, silent for 3.0 s"


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator(1, Rules(policy("sync")))


def seconds_of(caplog: pytest.LogCaptureFixture) -> list[tuple[int, float]]:
    """Step and seconds of each line."""
    return [(record.__dict__["step"], record.__dict__["seconds"]) for record in caplog.records]


def test_a_wait_is_said_before_ten_seconds_and_again(
    coordinator: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "psserver")
    notice = WaitNotice(100.0)
    for second in range(101, 121):
        notice.look(coordinator, WHOM, second)

    assert seconds_of(caplog) == [(1, 8), (1, 16)]
    assert caplog.records[0].__dict__["waiting_for"] == WHOM


def test_another_step_or_nobody_begins_anew(coordinator: Coordinator, caplog: pytest.LogCaptureFixture) -> None:
    """A job that is slow but moves says nothing."""
    caplog.set_level(logging.INFO, "psserver")
    notice = WaitNotice(100.0)
    for second in range(101, 121):
        coordinator.version = second // 7
        notice.look(coordinator, WHOM, second)
    for second in range(121, 141):
        notice.look(coordinator, "" if second % 5 else WHOM, second)

    assert seconds_of(caplog) == []
