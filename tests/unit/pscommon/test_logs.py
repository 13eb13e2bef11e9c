"""Logs: one handler, readable or JSON, with the fields of the process and of the context."""

import io
import json
import logging
import re
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from pscommon.telemetry import logs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def restored_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    loggers = [logging.getLogger(name) for name in (None, *logs.WORKER_LOGGERS)]
    before = [(each, each.level, list(each.handlers), each.propagate) for each in loggers]
    kind = logging.getLoggerClass()
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        logging.captureWarnings(False)  # an earlier test may have enabled it
        yield
        logging.captureWarnings(False)
    for logger, level, handlers, propagate in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers
        logger.propagate = propagate
    logging.setLoggerClass(kind)
    logs.bind(job=None, shard=None, worker=None)
    structlog.reset_defaults()


def json_lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_piped_logs_are_one_json_event_per_line() -> None:
    stream = io.StringIO()
    logs.set_up(stream=stream, shard=1)

    structlog.get_logger("psserver").info("listening", address="127.0.0.1:1", text="two\nlines")

    (event,) = json_lines(stream)
    time = event.pop("time")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", time)
    assert event == {
        "event": "listening",
        "level": "info",
        "logger": "psserver",
        "address": "127.0.0.1:1",
        "text": "two\nlines",
        "shard": 1,
    }


def test_logs_of_the_user_are_included() -> None:
    stream = io.StringIO()
    logs.set_up(stream=stream, worker=0)

    logging.getLogger("user.code").warning("loss is %.1f", 0.5, extra={"epoch": 3})

    (event,) = json_lines(stream)
    assert (event["event"], event["level"], event["logger"]) == (
        "loss is 0.5",
        "warning",
        "user.code",
    )
    assert (event["worker"], event["epoch"]) == (0, 3)


def test_fields_of_the_user_do_not_replace_common_fields() -> None:
    stream = io.StringIO()
    logs.set_up(stream=stream, worker=0)

    ours = {"event": "E", "level": "zz", "time": 3, "logger": "not me"}
    logging.getLogger("user").error("text", extra={**ours, "worker": 9, "epoch": 3})

    (event,) = json_lines(stream)
    assert (event["event"], event["level"], event["logger"]) == ("text", "error", "user")
    assert re.fullmatch(r"\d{4}-.*Z", event["time"])
    assert (event["worker"], event["epoch"]) == (9, 3)


def test_warnings_are_events() -> None:
    stream = io.StringIO()
    logs.set_up(stream=stream, worker=0)

    warnings.warn("careful", UserWarning, stacklevel=1)

    (event,) = json_lines(stream)
    assert "UserWarning: careful" in event["event"]
    assert (event["level"], event["logger"], event["worker"]) == ("warning", "py.warnings", 0)


def test_basic_config_of_the_user_does_not_double_the_lines() -> None:
    stream = io.StringIO()
    logs.set_up(stream=stream)

    logging.basicConfig(level="DEBUG")
    logging.getLogger("user").info("once")

    assert len(json_lines(stream)) == 1


def test_every_parser_reads_the_json_lines() -> None:
    stream = io.StringIO()
    logs.set_up(stream=stream)

    logging.getLogger("user").info(
        "text", extra={"loss": float("nan"), "sizes": {(1, 2): float("inf")}}
    )
    structlog.get_logger("psserver").info("text", norm=float("inf"))

    first, second = json_lines(stream)
    assert (first["loss"], first["sizes"], second["norm"]) == (None, {"(1, 2)": None}, None)


def test_exceptions_are_on_the_line_of_their_event() -> None:
    stream = io.StringIO()
    logs.set_up(stream=stream)

    for log in (structlog.get_logger("a"), logging.getLogger("b")):
        try:
            raise ValueError("bad data")
        except ValueError:
            log.exception("failed")

    first, second = json_lines(stream)
    assert "ValueError: bad data" in first["exception"]
    assert "ValueError: bad data" in second["exception"]


def test_a_terminal_gets_text() -> None:
    stream = Terminal()
    logs.set_up(stream=stream, job="otter")

    structlog.get_logger("psserver").warning("shard lost", address="host:1")

    plain = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert plain != stream.getvalue()
    assert re.fullmatch(
        r"\S+Z \[warning\] shard lost +\[psserver\] address=host:1 job=otter\n", plain
    )


@pytest.mark.parametrize(
    ("variable", "stream", "coloured"),
    [
        (None, Terminal(), True),
        ("NO_COLOR", Terminal(), False),
        ("FORCE_COLOR", io.StringIO(), True),
    ],
)
def test_colours_are_used_on_a_terminal_only(
    variable: str | None, stream: io.StringIO, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv(variable, "1")
    logs.set_up(log_format="text", stream=stream)

    logging.getLogger().warning("text")

    assert ("\x1b[" in stream.getvalue()) is coloured


@pytest.mark.parametrize(
    ("log_format", "stream", "first"), [("json", Terminal(), "{"), ("text", io.StringIO(), "2")]
)
def test_the_format_can_be_chosen(log_format: logs.Format, stream: io.StringIO, first: str) -> None:
    logs.set_up(log_format=log_format, stream=stream)

    logging.getLogger().warning("text")

    assert stream.getvalue()[0] == first


@pytest.mark.parametrize(("level", "seen"), [("debug", 3), ("info", 2), ("error", 0)])
def test_the_level_limits_the_events(level: str, seen: int) -> None:
    stream = io.StringIO()
    logs.set_up(level, stream=stream)

    logging.getLogger("a").info("text")
    structlog.get_logger("b").info("text")
    structlog.get_logger("c").debug("text")

    assert len(json_lines(stream)) == seen


def test_loggers_created_before_set_up_follow_it() -> None:
    log = structlog.stdlib.get_logger("early")
    log.bind(x=1)
    stream = io.StringIO()

    logs.set_up(stream=stream)
    log.info("text")

    assert len(json_lines(stream)) == 1


def test_fields_of_the_process_reach_every_thread() -> None:
    stream = io.StringIO()
    logs.set_up(stream=stream, shard=0)
    logs.bind(job="otter")

    thread = threading.Thread(target=structlog.get_logger("a").info, args=("text",))
    thread.start()
    thread.join()
    logs.bind(job=None)
    structlog.get_logger("a").info("text")

    first, second = json_lines(stream)
    assert (first["shard"], first["job"]) == (0, "otter")
    assert "job" not in second


def test_fields_of_a_context_and_of_an_event_take_precedence() -> None:
    stream = io.StringIO()
    logs.set_up(stream=stream, shard=0)

    with logs.bound(shard=1):
        structlog.get_logger("a").info("text")
        structlog.get_logger("a").info("text", shard=2)
    structlog.get_logger("a").info("text")

    assert [event["shard"] for event in json_lines(stream)] == [1, 2, 0]


def test_the_last_set_up_applies() -> None:
    first, second = io.StringIO(), io.StringIO()
    logs.set_up(stream=first, shard=1)
    logs.set_up(stream=second)

    logging.getLogger().warning("text")

    assert first.getvalue() == ""
    assert "shard" not in json_lines(second)[0]


# ---- a worker: all but two loggers belong to the script ------------------------------------------


def test_a_worker_leaves_the_root_logger_warnings_and_structlog_to_the_script() -> None:
    root = logging.getLogger()
    before = (
        root.level,
        list(root.handlers),
        warnings.showwarning,
        logging.getLoggerClass(),
        structlog.is_configured(),
    )

    logs.set_up_worker("debug", stream=io.StringIO(), rank=0)

    after = (
        root.level,
        root.handlers,
        warnings.showwarning,
        logging.getLoggerClass(),
        structlog.is_configured(),
    )
    assert after == before


def test_events_of_a_worker_have_the_same_format_and_come_once() -> None:
    """They do not reach the handlers of the script, whose levels do not hide them."""
    stream, scripts = io.StringIO(), io.StringIO()
    root = logging.getLogger()
    root.handlers[:] = [logging.StreamHandler(scripts)]
    root.setLevel("ERROR")

    logs.set_up_worker(stream=stream, rank=1)
    logs.get_logger("psworker.job").info("rejoined", worker=3)
    logs.get_logger("pscommon.telemetry.http").debug("hidden")
    logging.getLogger("user").warning("not ours")

    (event,) = json_lines(stream)
    assert re.fullmatch(r"\d{4}-.*Z", event.pop("time"))
    assert event == {
        "event": "rejoined",
        "level": "info",
        "logger": "psworker.job",
        "worker": 3,
        "rank": 1,
    }
    assert scripts.getvalue() == ""


def test_the_level_of_a_worker_does_not_hide_lines_of_the_script() -> None:
    stream, scripts = io.StringIO(), io.StringIO()
    root = logging.getLogger()
    root.handlers[:] = []

    logs.set_up_worker("warning", stream=stream)
    logging.basicConfig(stream=scripts, level="INFO", format="%(message)s")
    logging.getLogger("user").info("step %d", 1)
    logs.get_logger("psworker.job").info("rejoined", worker=3)

    assert (scripts.getvalue(), stream.getvalue()) == ("step 1\n", "")


# ---- our own loggers -----------------------------------------------------------------------------


def test_own_events_have_key_fields_and_module() -> None:
    stream = io.StringIO()
    logs.set_up(stream=stream, shard=1)

    logs.get_logger("psserver.app").warning("worker_lost", worker=3, reason="its lease ended")

    (event,) = json_lines(stream)
    del event["time"]
    assert event == {
        "event": "worker_lost",
        "level": "warning",
        "logger": "psserver.app",
        "worker": 3,
        "reason": "its lease ended",
        "shard": 1,
    }


def test_own_events_are_readable_on_a_terminal() -> None:
    stream = Terminal()
    logs.set_up(stream=stream, job="otter")

    logs.get_logger("psserver.app").warning("worker_lost", worker=3, reason="its lease ended")

    plain = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert re.fullmatch(
        r"\S+Z \[warning\] worker_lost +\[psserver.app\] worker=3 reason='its lease ended' "
        r"job=otter\n",
        plain,
    )


def test_own_exceptions_have_a_traceback() -> None:
    stream = io.StringIO()
    logs.set_up(stream=stream)

    try:
        raise ValueError("bad data")
    except ValueError:
        logs.get_logger("a").exception("rpc_failed")

    (event,) = json_lines(stream)
    assert event["event"] == "rpc_failed"
    assert "ValueError: bad data" in event["exception"]


@pytest.mark.parametrize("kind", [logging.Logger, structlog.stdlib._FixedFindCallerLogger])
def test_a_script_without_set_up_gets_events_through_its_handlers(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: type[logging.Logger],
) -> None:
    """With key and fields in the message, the caller's location, and the levels of the script."""
    stream, root = io.StringIO(), logging.getLogger()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(filename)s %(worker)s %(message)s"))
    root.handlers[:] = [handler]
    root.setLevel("INFO")
    monkeypatch.setattr(logging, "_loggerClass", kind)
    log = logs.get_logger(f"psworker.{kind.__name__}")

    log.info("rejoined", worker=3, version=7)
    log.debug("retire_failed", worker=3)

    assert stream.getvalue() == "INFO test_logs.py 3 rejoined worker=3 version=7\n"
    assert capsys.readouterr().out == ""
