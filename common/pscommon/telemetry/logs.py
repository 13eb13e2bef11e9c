"""Logs of structlog and the standard library through one handler, one event a line.

Text on a terminal, JSON otherwise; times are UTC, RFC 3339. In the processes of this package,
other loggers and Python's warnings use the same handler. In a worker they belong to the script.
"""

import io
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from pscommon.telemetry import strict_json

Format = Literal["auto", "text", "json"]

# Fields of the process. Context variables do not suffice: threads of gRPC start with an empty
# context.
_fields: dict[str, Any] = {}

_EXTRA = structlog.stdlib.ExtraAdder()

WORKER_LOGGERS = ("psworker", "pscommon")
"""Loggers that have a handler and a level in a worker."""

LIMITED_SECONDS = 10.0
"""Time between two lines of a limited event."""

LIMITED_LIBRARIES = ("asyncio", "grpc", "opentelemetry")
"""Their loggers are limited, too: gRPC logs a traceback for metadata that it cannot decode."""

# by logger and event: the time of the last line, and the number of those left out since
_limited: dict[tuple[str, str], tuple[float, int]] = {}
_limited_lock = threading.Lock()

# frames of structlog between a statement and the standard library's logger
_STRUCTLOG_FRAME_COUNT = 3


@dataclass(frozen=True)
class Event:
    """The message of a record: what happened. Handlers of the user's print key and fields."""

    key: str
    fields: Mapping[str, Any]

    def __str__(self) -> str:
        return " ".join([self.key, *(f"{name}={value}" for name, value in self.fields.items())])


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return the logger of a module.

    Its events travel through the standard library's logging, with or without `set_up`: in a user's
    process they reach the user's handlers and obey the user's levels.

    An event that a peer can cause has `limited=True`: or a peer could fill the disk. It is logged
    at most once in LIMITED_SECONDS; its field `omitted` counts the lines left out before it.
    """
    return structlog.stdlib.BoundLogger(
        logging.getLogger(name), [structlog.stdlib.filter_by_level, _limit, _to_record], {}
    )


def _limit(logger: logging.Logger, _: str, fields: EventDict) -> EventDict:
    if fields.pop("limited", False):
        omitted = _take_turn(logger.name, fields["event"])
        if omitted is None:
            raise structlog.DropEvent
        if omitted:
            fields["omitted"] = omitted
    return fields


def _limit_library(record: logging.LogRecord) -> bool:
    """Return whether to log a record, which may be of a library that logs what peers send."""
    if record.name.partition(".")[0] in LIMITED_LIBRARIES:
        omitted = _take_turn(record.name, "")
        if omitted is None:
            return False
        if omitted:
            record.omitted = omitted
    return True


def _take_turn(logger: str, event: str) -> int | None:
    """Return how many lines were left out since the last one; None: leave out this one, too."""
    now = time.monotonic()
    with _limited_lock:
        logged_at, omitted = _limited.get((logger, event), (-LIMITED_SECONDS, 0))
        if now - logged_at < LIMITED_SECONDS:
            _limited[logger, event] = logged_at, omitted + 1
            return None
        _limited[logger, event] = now, 0
    return omitted


def forget_limits() -> None:
    """Log the next event of each kind."""
    with _limited_lock:
        _limited.clear()


def _to_record(logger: logging.Logger, _: str, fields: EventDict) -> EventDict:
    # structlog's own class of loggers, which set_up() installs, skips these frames itself
    is_plain = type(logger).findCaller is logging.Logger.findCaller
    return {
        "msg": Event(fields.pop("event"), fields),
        "exc_info": fields.pop("exc_info", None),
        "extra": fields,
        "stacklevel": 1 + _STRUCTLOG_FRAME_COUNT * is_plain,
    }


def set_up(
    level: str = "info",
    log_format: Format = "auto",
    stream: TextIO | io.TextIOBase | None = None,
    **fields: Any,
) -> None:
    """Configure the logging of a process of this package; a later call replaces it.

    Args:
        level: lowest level to log.
        log_format: "text", "json" or "auto" (text on a terminal, JSON otherwise). Text has
            colours on a terminal unless NO_COLOR is set, elsewhere if FORCE_COLOR is set.
        stream: output; default stderr.
        fields: fields of every event (shard=, rank=).
    """
    _set_process_fields(fields)
    _equip(logging.getLogger(), level, _handler(log_format, stream or sys.stderr))
    logging.captureWarnings(True)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            *_shared(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,  # reconfigures loggers made before set_up
    )


def set_up_worker(
    level: str = "info",
    log_format: Format = "auto",
    stream: TextIO | io.TextIOBase | None = None,
    **fields: Any,
) -> None:
    """Configure only the WORKER_LOGGERS, with the arguments of `set_up`.

    The root logger, `warnings` and the defaults of structlog belong to the script.
    """
    _set_process_fields(fields)
    handler = _handler(log_format, stream or sys.stderr)
    for name in WORKER_LOGGERS:
        logger = logging.getLogger(name)
        _equip(logger, level, handler)
        logger.propagate = False


def _set_process_fields(fields: dict[str, Any]) -> None:
    _fields.clear()
    bind(**fields)


def _handler(log_format: Format, stream: TextIO | io.TextIOBase) -> logging.Handler:
    as_json = log_format == "json" or (log_format == "auto" and not stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_formatter(as_json, colors=not as_json and _coloured(stream)))
    handler.addFilter(_limit_library)
    return handler


def _equip(logger: logging.Logger, level: str, handler: logging.Handler) -> None:
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())


def bind(**fields: Any) -> None:
    """Add fields to every event of this process; None removes a field."""
    for name, value in fields.items():
        if value is None:
            _fields.pop(name, None)
        else:
            _fields[name] = value


@contextmanager
def bound(**fields: Any) -> Iterator[None]:
    """Add fields within this context; they override those of the process."""
    with structlog.contextvars.bound_contextvars(**fields):
        yield


def _shared() -> list[Processor]:
    """Return the processors of all events, from structlog and logging."""
    return [
        structlog.contextvars.merge_contextvars,
        _add_process_fields,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.StackInfoRenderer(),
    ]


def _add_process_fields(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    for name, value in _fields.items():
        event.setdefault(name, value)
    return event


def _add_extra(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Add the fields of an event or of `extra=`; they do not override standard fields."""
    for name, value in _EXTRA(logger, method, {"_record": event["_record"]}).items():
        event.setdefault(name, value)
    message = event["_record"].msg
    if isinstance(message, Event):
        event["event"] = message.key
    return event


def _formatter(as_json: bool, colors: bool) -> logging.Formatter:
    renderers: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if as_json:
        renderers += [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(strict_json.dumps, default=str),
        ]
    else:
        renderers.append(
            structlog.dev.ConsoleRenderer(
                colors=colors,
                timestamp_key="time",
                pad_event_to=0,
                pad_level=False,
                sort_keys=False,  # as in the statement
                exception_formatter=structlog.dev.plain_traceback,
            )
        )
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[_add_extra, *_shared()], processors=renderers
    )


def _coloured(stream: TextIO | io.TextIOBase) -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    return stream.isatty() or bool(os.environ.get("FORCE_COLOR"))
