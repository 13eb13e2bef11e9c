"""Logs are events with fields, from one logger per module; docs/operations/events.md lists them."""

import ast
import logging
import re
from collections.abc import Iterator
from typing import NamedTuple

from tests.support.sources import ROOT, Source, packages

PAGE = ROOT / "docs" / "operations" / "events.md"
HOME = "pscommon.telemetry.logs"
"""The module that creates loggers."""
EXAMPLES = "psworker.examples"
"""Examples log as scripts of users do."""

LEVELS = {
    "debug": "debug",
    "info": "info",
    "warning": "warning",
    "error": "error",
    "exception": "error",
}
KEY = re.compile(r"[a-z]+(_[a-z]+)*")
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \|", re.M)
SHARED = {"environment_variable_unknown"}
"""Failures that two commands report in the same way."""
RESERVED = {*vars(logging.makeLogRecord({})), "message", "asctime", "event", "level", "time"} | {
    "logger",
    "exception",
    "extra",
}
"""Field names that records or our handlers use themselves."""
ARGUMENTS = {"exc_info", "limited"}


class Statement(NamedTuple):
    source: Source
    call: ast.Call

    @property
    def place(self) -> str:
        return f"{self.source.module}:{self.call.lineno}"

    @property
    def level(self) -> str:
        assert isinstance(self.call.func, ast.Attribute)
        return LEVELS[self.call.func.attr]

    @property
    def key(self) -> str:
        """The event; empty unless the call has one literal and no other positional argument."""
        match self.call.args:
            case [ast.Constant(value=str() as key)] if KEY.fullmatch(key):
                return key
        return ""


def sources() -> Iterator[Source]:
    for source in packages():
        if source.module.startswith(("pscommon.", "psserver.", "psworker.")) and (
            not source.module.startswith(EXAMPLES)
        ):
            yield source


def statements() -> Iterator[Statement]:
    for source in sources():
        for node in source.nodes:
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="log"), attr=name)) if (
                    name in LEVELS
                ):
                    yield Statement(source, node)


def test_each_module_has_one_logger_of_its_own_name() -> None:
    others = [
        source.module
        for source in sources()
        if source.module != HOME
        and re.search(r"getLogger|structlog|get_logger\((?!__name__\))", source.text)
    ]
    unbound = [
        source.module
        for source in sources()
        if source.module != HOME
        and source.text.count("get_logger(") != source.text.count("\nlog = get_logger(__name__)\n")
    ]

    assert (others, unbound) == ([], [])


def test_an_event_is_one_literal_key_with_fields() -> None:
    assert [each.place for each in statements() if not each.key] == []


def test_fields_have_names_that_log_records_do_not_use() -> None:
    taken = [
        (each.place, keyword.arg)
        for each in statements()
        for keyword in each.call.keywords
        if keyword.arg in RESERVED - ARGUMENTS
    ]

    assert taken == []


def test_different_failures_have_different_events() -> None:
    failures = [each.key for each in statements() if each.level in ("warning", "error")]

    assert {key for key in failures if failures.count(key) > 1} <= SHARED


def test_the_page_lists_every_event_with_its_level() -> None:
    found = {(each.key, each.level) for each in statements() if each.level != "debug"}
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))

    assert len(rows) == len(set(rows))
    assert set(rows) - found == set(), f"rows of {PAGE.name} without a statement"
    assert found - set(rows) == set(), f"events that {PAGE.name} lacks"
