"""Complete benchmark works: participants, and one run from the first word to the table."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks import record
from benchmarks.bars import BARS
from benchmarks.record import Result
from benchmarks.rounds import Entry
from benchmarks.scale import FULL, SCALES, TINY, Scale
from benchmarks.setup import Setup
from benchmarks.shapes import shapes
from benchmarks.speaker import ROOT, Command
from benchmarks.works import WORKS, overlap
from benchmarks.works.work import Lineup, Work

FAST = [work for work in WORKS if work is not overlap.WORK]
"""Those whose lineup needs nothing but names."""


@pytest.mark.parametrize("work", FAST, ids=lambda work: work.name)
@pytest.mark.parametrize("scale", SCALES.values(), ids=lambda scale: scale.name)
def test_lineups_are_complete_and_possible(work: Work, scale: Scale) -> None:
    """Names are unique. Contenders of every limit take part or are skipped with a reason, and their
    models exist.
    """
    with ExitStack() as resources:
        lineup = work.lineup(scale, resources)
    names = [entry.name for entry in lineup.entries]
    needed = {name for bar in BARS if bar.result == work.name for name in bar.needs}

    assert len(set(names)) == len(names)
    assert not set(names) & set(lineup.skipped)
    assert needed <= set(names) | set(lineup.skipped)
    assert all(lineup.skipped.values())
    asked = [
        argument
        for entry in lineup.entries
        for argument in entry.command.args
        if argument.startswith("{")
    ]
    assert all(shapes(setup.model, setup.nbytes) for setup in map(Setup.from_json, asked))


def test_works_have_at_least_seven_rounds() -> None:
    assert all(scale.rounds >= 7 for scale in SCALES.values() if scale is not TINY)
    assert FULL.growth == (1, 2, 4, 8, 16)


def lineup(scale: Scale, resources: ExitStack) -> Lineup:
    talker = Command("tests.support.fake_contender", ("1.5",))
    return Lineup(
        [Entry("one", talker), Entry("two", talker, "burn")], {"three": "it is shy"}, {"fact": 1.0}
    )


def test_a_run_measures_each_entry_once_per_round() -> None:
    """Two entries share a process; skipped entries and facts are recorded."""
    messages: list[str] = []

    found: Result = Work("a_work", "About it.", lineup).run(TINY, messages.append)

    assert found.records["one"]["seconds"] == [1.5, 1.5]
    assert [len(values) for values in found.records["two"].values()] == [2] * 3
    assert (found.skipped, found.facts, found.rounds) == ({"three": "it is shy"}, {"fact": 1.0}, 2)
    assert found.versions["torch"]
    assert messages == ["2 contenders warm up", "round 1 of 2", "round 2 of 2"]


def failing(scale: Scale, resources: ExitStack) -> Lineup:
    return Lineup([Entry("one", Command("tests.support.fake_contender", ("1.5",)), "fail")])


def test_a_failing_contender_fails_the_work() -> None:
    with pytest.raises(RuntimeError, match="ended with exit code 1"):
        Work("a_work", "About it.", failing).run(TINY, lambda text: None)


def test_the_command_runs_a_work_and_writes_its_report(tmp_path: Path) -> None:
    """It prints the limits and writes JSON and a page."""
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "--scale",
        "tiny",
        "--only",
        "smallest",
        "--output",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)

    assert done.returncode == 0, done.stderr
    assert "| 4 | paramserver, grpc | bare gRPC call | 2.5 |" in done.stdout
    assert "| 1 |" not in done.stdout
    assert record.load(tmp_path)["smallest"].rounds == 2
    assert "## smallest" in (tmp_path / "README.md").read_text()
