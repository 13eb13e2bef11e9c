"""ps-run kills and restarts a worker whose script hangs after the servers have dropped it."""

from typing import Any

from psworker.run.launcher import hung_processes
from psworker.supervision.decisions import (
    KillProcess,
    ShowMessage,
    StartProcess,
)
from psworker.supervision.supervisor import Supervisor


def row(worker: int, pid: int, is_hung: bool, host: str = "here") -> dict[str, Any]:
    return {"worker": worker, "pid": pid, "hung": is_hung, "host": host}


def test_processes_whose_newest_worker_is_hung_are_found() -> None:
    """After a hang the script may continue and rejoin as a new worker of the same process."""
    rows = [
        row(10, 7, False),
        row(1, 5, True),
        row(9, 7, True),
        row(3, 6, True, "there"),
        row(4, 8, False),
    ]

    assert hung_processes({"workers": rows}) == {("here", 5), ("there", 6)}
    assert hung_processes({}) == set()


def started() -> Supervisor:
    machine = Supervisor(1, 2, max_restarts=1, durable=False, grace=5.0)
    machine.start(0.0)
    machine.bound("s0", 0.0)
    return machine


def test_a_hung_worker_is_killed_and_restarted() -> None:
    machine = started()

    message, kill = machine.hung("w1", 0.0)

    assert isinstance(message, ShowMessage)
    assert "w1 is killed: its script hangs (--progress-timeout)" in message.text
    assert kill == KillProcess("w1")
    assert StartProcess("w1", 1) in machine.exited("w1", -9, "", 0.0)


def test_a_hung_worker_that_has_exited_is_not_killed() -> None:
    machine = started()
    machine.exited("w1", 0, "", 0.0)

    assert machine.hung("w1", 0.0) == []


def test_an_ending_run_does_not_kill_a_hung_worker_early() -> None:
    machine = started()
    machine.signalled(2, 0.0)

    assert machine.hung("w1", 0.0) == []
