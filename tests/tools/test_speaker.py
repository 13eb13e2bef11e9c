"""Communication with contenders, and their memory and CPU time as the kernel reports them."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from benchmarks import processes
from benchmarks.rounds import Contest, Entry, measure
from benchmarks.speaker import ROOT, Command, Speaker, Team
from tests.support.fake_contender import BURNT

MODULE = "tests.support.fake_contender"
TALKER = Command(MODULE, ("1.5",))


@pytest.fixture
def talker() -> Iterator[Speaker]:
    with Speaker(TALKER) as speaker:
        speaker.wait_until_ready()
        yield speaker


def test_a_contender_answers_each_word_with_measurements(talker: Speaker) -> None:
    assert [talker.ask("go") for _ in range(2)] == [{"seconds": 1.5}] * 2


def test_cpu_seconds_are_counted_per_piece(talker: Speaker) -> None:
    """The contender uses CPU for two pieces of work."""
    measured = measure(talker, "burn")

    assert measured["seconds"] == BURNT
    assert BURNT / 2 - processes.TICK <= measured["cpu"] <= BURNT / 2 + 0.1
    assert "count" not in measured


def test_a_spinning_contender_is_stopped_during_other_turns(talker: Speaker) -> None:
    """It would take the cores that the others are measured on."""
    spinner = Entry("spinner", Command(MODULE, ("1.5", "spin")), spins=True)
    with ExitStack() as resources:
        contest = Contest([spinner, Entry("other", TALKER, "burn")], resources)
        pids = processes.descendants(os.getpid(), "spin")
        records = contest.run(3, lambda _: None)
        talker.ask("burn")  # a thread that runs just then stops a moment after it was told to
        used = processes.cpu_seconds(pids)
        talker.ask("burn")
        assert processes.cpu_seconds(pids) == used

    assert records["spinner"]["seconds"] == [1.5] * 3
    assert processes.descendants(os.getpid(), "spin") == []


def test_a_failing_contender_has_no_result(capfd: pytest.CaptureFixture[str]) -> None:
    with Speaker(TALKER) as talker:
        talker.wait_until_ready()
        with pytest.raises(RuntimeError, match="ended with exit code 1"):
            talker.ask("fail")

    assert "this work cannot be done" in capfd.readouterr().err


def test_a_contender_that_never_becomes_ready_fails(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        Speaker(Command("benchmarks.no_such_module")) as speaker,
        pytest.raises(RuntimeError, match="ended with exit"),
    ):
        speaker.wait_until_ready()

    assert "No module named" in capfd.readouterr().err


def test_a_team_takes_the_time_of_its_slowest_member() -> None:
    members = [Speaker(Command(MODULE, (seconds,))) for seconds in ("1.5", "2.5", "0.5")]
    with members[0], members[1], members[2]:
        assert Team(members).go() == {"seconds": 2.5}


def test_child_processes_are_found_by_their_command(talker: Speaker) -> None:
    assert talker.pid in processes.family(os.getpid())
    assert processes.descendants(os.getpid(), MODULE) == [talker.pid]
    assert processes.descendants(talker.pid, MODULE) == []


def test_memory_and_its_peak(talker: Speaker) -> None:
    """Python uses megabytes; a peak is at least the current value."""
    memory = processes.memory_bytes(talker.pid)

    assert memory["now"] > 1e6
    assert memory["peak"] >= memory["now"]
    assert processes.memory_bytes(os.getpid())["now"] > 1e6


def test_contenders_exit_when_the_driver_is_killed() -> None:
    """A remaining contender would use the machine's time."""
    code = (
        "from benchmarks.speaker import *; s = Speaker(Command('tests.support.fake_contender', "
        "('1',))); s.wait_until_ready(); print(s.pid, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stdout is not None
        watched = os.pidfd_open(int(driver.stdout.readline()))
        driver.send_signal(signal.SIGKILL)
    with os.fdopen(watched) as file:
        assert select.select([file], [], [], 30)[0]
