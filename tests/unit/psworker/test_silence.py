"""Unanswered heartbeats are logged, and so is the next answer."""

import logging

import pytest

from psworker.connection.membership import SilenceLogger

LOST = "shard 0 at a:1 (Heartbeat) did not answer in time"


def messages(caplog: pytest.LogCaptureFixture, answers: str, seconds: float = 1.0) -> list[str]:
    """Return the log lines of heartbeats at this interval.

    A "." is an answered heartbeat, an "x" one without an answer.
    """
    caplog.set_level(logging.INFO, "psworker")
    silence = SilenceLogger(7, 0.0)
    for number, answer in enumerate(answers, 1):
        silence.record(number * seconds, LOST if answer == "x" else "")
    return caplog.messages


def test_one_lost_heartbeat_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert messages(caplog, "..x.x..") == []


def test_two_lost_heartbeats_are_logged_and_repeated_every_eight_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = messages(caplog, "." + "x" * 17)

    assert first == f"heartbeats_unanswered worker=7 silent_seconds=2 problem={LOST}"
    assert second == f"heartbeats_unanswered worker=7 silent_seconds=10 problem={LOST}"


def test_the_end_of_a_logged_silence_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert messages(caplog, ".xxx..")[1:] == ["heartbeats_answered worker=7 silent_seconds=4"]
