"""A coordinator that does not answer heartbeats is spoken of, and so is its return."""

import logging

import pytest

from psworker.connection.membership import SilenceLogger

LOST = "shard 0 at a:1 (Heartbeat) did not answer in time"


def told(caplog: pytest.LogCaptureFixture, answers: str, seconds: float = 1.0) -> list[str]:
    """What is said of heartbeats so many seconds apart: "." for one that was answered, "x" for
    one that was not.
    """
    caplog.set_level(logging.INFO, "psworker")
    silence = SilenceLogger(7, 0.0)
    for number, answer in enumerate(answers, 1):
        silence.record(number * seconds, LOST if answer == "x" else "")
    return caplog.messages


def test_one_lost_heartbeat_is_not_worth_a_line(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, "..x.x..") == []


def test_two_are_and_then_one_line_every_eight_seconds(caplog: pytest.LogCaptureFixture) -> None:
    first, second = told(caplog, "." + "x" * 17)

    assert first == f"heartbeats_unanswered worker=7 silent_seconds=2 problem={LOST}"
    assert second == f"heartbeats_unanswered worker=7 silent_seconds=10 problem={LOST}"


def test_the_end_of_a_silence_that_was_spoken_of_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, ".xxx..")[1:] == ["heartbeats_answered worker=7 silent_seconds=4"]
