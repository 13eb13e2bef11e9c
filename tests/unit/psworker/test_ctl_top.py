"""`ps-ctl top`: a status becomes lines that fit a terminal; without one it is printed once."""

import json
from typing import Any

import pytest

from psworker.ctl.cli import main
from psworker.ctl.top import COLUMNS_COUNT, screen
from tests.support.ctl_output import Output
from tests.support.ctl_servers import STATUS, Cluster, serving

ROWS = 24
WORKERS = 256
EVENT = {
    "time": "2026-11-28T05:28:06.123456Z",
    "level": "warning",
    "event": "worker_slow",
    "fields": {"worker": 7, "reason": "x" * 200},
}


def worker(number: int) -> dict[str, Any]:
    """Return a worker that is the slower, the lower its number."""
    return {
        **STATUS["workers"][0],
        "worker": number,
        "health": "live",
        "own_seconds": 10.0 - number / WORKERS,
    }


@pytest.fixture
def crowded() -> dict[str, Any]:
    workers = [worker(number) for number in reversed(range(WORKERS))]
    return {**STATUS, "workers": workers, "events": [EVENT] * 200}


def test_many_workers_fit_the_screen_slowest_first(crowded: dict[str, Any]) -> None:
    lines = screen(crowded, COLUMNS_COUNT, ROWS)
    start = lines.index("Workers")
    numbers = [line.split()[0] for line in lines[start + 2 : lines.index("Servers") - 1]]
    *shown, omitted = map(int, numbers)

    assert len(lines) <= ROWS
    assert max(map(len, lines)) <= COLUMNS_COUNT
    assert shown == list(range(len(shown)))
    assert f"{omitted} more" in lines
    assert len(shown) + omitted == WORKERS


def test_a_worker_has_its_numbers_in_80_columns(crowded: dict[str, Any]) -> None:
    lines = screen(crowded, COLUMNS_COUNT, ROWS)
    start = lines.index("Workers")

    assert lines[start + 1].split("  ")[0].startswith("worker rank health own part step")
    assert lines[start + 2].split() == (
        ["0", "0", "live", "10", "s", "0.25", "s", "128", "0", "compute", "70%,", "wait", "18%"]
    )


def test_a_worker_with_a_problem_comes_first(crowded: dict[str, Any]) -> None:
    crowded["workers"][0] |= {"health": "hanging", "no_call_seconds": 42.0}
    lines = screen(crowded, 120, ROWS)
    first = lines[lines.index("Workers") + 2]

    assert first.split()[0] == str(WORKERS - 1)
    assert first.endswith("no call from its script for 42 s")


def test_the_newest_events_are_shown(crowded: dict[str, Any]) -> None:
    lines = screen(crowded, COLUMNS_COUNT, ROWS)

    assert lines[-1].startswith("05:28:06 warning worker_slow worker=7 reason=xxx")


@pytest.mark.parametrize("document", [{}, {"workers": [{}], "servers": [{}], "events": [{}]}])
def test_a_status_with_fewer_values_is_shown(document: dict[str, Any]) -> None:
    assert all(len(line) <= COLUMNS_COUNT for line in screen(document, COLUMNS_COUNT, ROWS))


def test_a_narrow_terminal_cuts(crowded: dict[str, Any]) -> None:
    assert max(map(len, screen(crowded, 20, ROWS))) <= 20


def test_control_characters_in_names_are_replaced() -> None:
    document = {**STATUS, "job": "a\x1b[31mb", "events": [{**EVENT, "event": "\x1b[2J"}]}
    lines = screen(document, COLUMNS_COUNT, ROWS)

    assert all(line.isprintable() for line in lines)


def test_without_a_terminal_top_prints_once(capsys: Output) -> None:
    with serving(Cluster()) as cluster:
        assert main(["--ps", cluster.address, "top"]) == 0
        printed = capsys.readouterr().out.splitlines()
        assert main(["--ps", cluster.address, "top", "--output", "json"]) == 0

    assert printed[0].startswith("job: job-7   state: running")
    assert "Workers" in printed
    assert json.loads(capsys.readouterr().out) == STATUS
