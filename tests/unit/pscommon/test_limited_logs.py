"""What a peer can cause is logged rarely, or it could fill the disk."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from pscommon.telemetry import logs


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    logging.captureWarnings(False)
    root.setLevel(level)
    root.handlers[:] = handlers
    structlog.reset_defaults()


def json_lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_limited_event_is_logged_once_in_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next line says how many were left out; each event and each module has its own count."""
    stream, now = io.StringIO(), 5.0
    logs.set_up(stream=stream)
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    log, other = logs.get_logger("a"), logs.get_logger("b")
    for _ in range(4):
        log.warning("peer_refused", limited=True, problem="no greeting")
    log.warning("call_refused", limited=True)
    other.warning("peer_refused", limited=True)
    log.debug("peer_refused", limited=True)  # below the level, so it is not counted
    now += logs.LIMITED_SECONDS
    log.warning("peer_refused", limited=True)
    log.warning("peer_refused", limited=True)

    lines = [(line["logger"], line["event"], line.get("omitted", 0)) for line in json_lines(stream)]
    assert lines == [
        ("a", "peer_refused", 0),
        ("a", "call_refused", 0),
        ("b", "peer_refused", 0),
        ("a", "peer_refused", 3),
    ]


def test_lines_of_grpc_are_limited() -> None:
    """It logs a traceback for each call whose metadata it cannot decode."""
    stream = io.StringIO()
    logs.set_up(stream=stream)
    for number in range(3):
        logging.getLogger("grpc._cython.cygrpc").error(f"Invalid encoding on {number}")
        logging.getLogger("other").error("x")

    names = [line["logger"] for line in json_lines(stream)]
    assert sorted(names) == ["grpc._cython.cygrpc", "other", "other", "other"]
