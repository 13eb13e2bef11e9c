"""Events in captured log records."""

import logging

import pytest

from pscommon.telemetry.logs import Event


def event_key(record: logging.LogRecord) -> str:
    """Return the event of a record; empty if the record is not from our code."""
    return record.msg.key if isinstance(record.msg, Event) else ""


def events(caplog: pytest.LogCaptureFixture, least: int = logging.NOTSET) -> list[str]:
    """Return the captured events of at least this level, in order."""
    return [event_key(record) for record in caplog.records if record.levelno >= least]


def records_of(caplog: pytest.LogCaptureFixture, *keys: str) -> list[logging.LogRecord]:
    """Return the captured records of these events."""
    return [record for record in caplog.records if event_key(record) in keys]
