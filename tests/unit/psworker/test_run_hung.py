"""What ps-run does about a worker whose script hangs and which the servers have dropped."""

from typing import Any

from psworker.launch.events import (
    KillProcess,
    ProcessExited,
    ServerBound,
    ShowMessage,
    SignalReceived,
    StartProcess,
    WorkerHung,
)
from psworker.launch.supervisor import Supervisor
from psworker.run.launcher import hung_pids


def row(worker: int, pid: int, is_hung: bool, host: str = "here") -> dict[str, Any]:
    return {"worker": worker, "pid": pid, "hung": is_hung, "host": host}


def test_those_that_have_no_other_place_are_found() -> None:
    """A script that comes out of its hang joins again, in the same process."""
    rows = [
        row(10, 7, False),
        row(1, 5, True),
        row(9, 7, True),
        row(3, 6, True, "there"),
        row(4, 8, False),
    ]

    assert hung_pids({"workers": rows}, "here") == {5}
    assert hung_pids({}, "here") == set()


def started() -> Supervisor:
    machine = Supervisor(1, 2, max_restarts=1, durable=False, grace=5.0)
    machine.start(0.0)
    machine.step(ServerBound("s0"), 0.0)
    return machine


def test_it_is_killed_and_started_again() -> None:
    machine = started()

    say, kill = machine.step(WorkerHung("w1"), 0.0)

    assert isinstance(say, ShowMessage)
    assert "w1 is killed: its script hangs (--progress-timeout)" in say.text
    assert kill == KillProcess("w1")
    assert StartProcess("w1", 1) in machine.step(ProcessExited("w1", -9), 0.0)


def test_one_that_has_ended_meanwhile_is_not_killed() -> None:
    machine = started()
    machine.step(ProcessExited("w1", 0), 0.0)

    assert machine.step(WorkerHung("w1"), 0.0) == []


def test_a_run_that_ends_anyway_gives_it_its_grace() -> None:
    machine = started()
    machine.step(SignalReceived(2), 0.0)

    assert machine.step(WorkerHung("w1"), 0.0) == []
