"""The newest log events of a process, for the job's status."""

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from pscommon.telemetry.logs import Event

MAX_EVENTS_COUNT = 200
MAX_TEXT_CHARACTERS = 200
"""Characters of one field: a peer can cause events, and each viewer of the status gets them all."""


class RecentEvents(logging.Handler):
    """Keeps the newest MAX_EVENTS_COUNT events of all loggers, from level info up."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS_COUNT)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Keep what is logged within this context."""
        logging.root.addHandler(self)
        try:
            yield
        finally:
            logging.root.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record. An error in it must not reach the code that logs."""
        try:
            self._events.append(_described(record))
        except Exception:
            self.handleError(record)

    def newest(self) -> list[dict[str, Any]]:
        """Return the events, oldest first:

        time: RFC 3339, UTC
        level: info, warning, error or critical
        event: key of the event; of a library, its message
        fields: texts by name
        """
        return list(self._events.copy())


def _described(record: logging.LogRecord) -> dict[str, Any]:
    if isinstance(record.msg, Event):
        key, fields = record.msg.key, dict(record.msg.fields)
    else:
        key, fields = record.getMessage(), {}
    if record.exc_info and record.exc_info[1] is not None:
        fields["exception"] = repr(record.exc_info[1])
    at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    return {
        "time": at.replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "event": key[:MAX_TEXT_CHARACTERS],
        "fields": {name: str(value)[:MAX_TEXT_CHARACTERS] for name, value in fields.items()},
    }
