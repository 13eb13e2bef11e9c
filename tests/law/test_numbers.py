"""docs/operations/numbers.md has a row for each number that a view shows, and no other row."""

import re
from collections.abc import Iterator

from psserver.core.workers.members import WorkerHeartbeat
from psserver.monitoring.live_page import FOLDER
from psserver.monitoring.training_curves import sample_job
from psworker.core.why import Bottleneck, Explanation, Phase
from psworker.ctl import top, views
from tests.support.clipped_job import ClippedJob
from tests.support.documentation_pages import ROOT

TEXTS = frozenset(
    {
        *("address", "complete", "connected", "device", "health", "host", "job", "newer one"),
        *("optimizer", "page", "policy", "reason", "snapshot problem", "standby state", "state"),
        *("training", "up", "waits for"),
    }
)
"""What the views show beside numbers."""

SCRIPT = (FOLDER / "page.js").read_text()
LISTS = ("SUMMARY", "WORKERS", "SERVERS", "SNAPSHOT")
"""Lists of the page's script; each entry has a name and a function."""


def list_of(name: str) -> str:
    found = re.search(rf"^const {name} = \[\n(.*?)^\];$", SCRIPT, re.MULTILINE | re.DOTALL)
    assert found is not None, name
    return found[1]


def page() -> Iterator[str]:
    for name in LISTS:
        entries = re.findall(r'^  \["([^"]+)", ', list_of(name), re.MULTILINE)
        assert len(entries) == len(re.findall(r"^  \[", list_of(name), re.MULTILINE))
        yield from entries
    phases = re.search(r"^const PHASES = \[(.*)\];$", SCRIPT, re.MULTILINE)
    assert phases is not None
    yield from re.findall(r'"(\w+)"', phases[1])


def in_top() -> Iterator[str]:
    yield from (name for name, _ in views.summary({}))
    yield from top.WORKERS
    yield from top.SERVERS


def tensorboard() -> Iterator[str]:
    """Return the tags of a job that measures everything."""
    job = ClippedJob()
    job.push(1, 1)
    job.push(2, 1)
    job.measure(4.0, 12.0)
    for member in job.machine.membership:
        member.heartbeat = WorkerHeartbeat(samples_per_second=100.0)
    yield from sample_job(job.machine, 0, (), [{"lr": 0.5}]).values


def in_why() -> set[str]:
    """Return the numbers of `ps-ctl why`: fields of JSON whose values are seconds or a ratio."""
    explanation = {"step_seconds", "hidden"} & {*Explanation._fields}
    return {*explanation, *Phase._fields, *{*Bottleneck._fields} - {"phase", "who"}}


def rows() -> list[str]:
    text = (ROOT / "docs/operations/numbers.md").read_text()
    cells = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_each_number_has_a_row_and_each_row_a_number() -> None:
    shown = {*page(), *in_top(), *tensorboard(), *in_why()}
    names = rows()

    assert shown - TEXTS - {*names} == set(), "numbers without a row"
    assert {*names} - shown == set(), "rows that nothing shows"
    assert shown >= TEXTS
    assert len(names) == len({*names})


def test_each_row_says_unit_measurement_and_time() -> None:
    text = (ROOT / "docs/operations/numbers.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("| `")]

    assert table
    for line in table:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 4, line
        assert all(cells), line
