"""Proofs that worker processes have ended: found or reported, never for a process that was not
seen.
"""

import subprocess
from collections.abc import Iterator

import pytest

from pscommon.system.process_id import process_id
from psserver.core.workers.membership import Membership
from psserver.process.worker_exits import FOUND, WorkerExits


class WorkerProcesses:
    """Workers 1 to 3 and the observed state of their processes."""

    def __init__(self) -> None:
        self.exits, self.membership = WorkerExits(), Membership(5.0)
        for rank in range(3):
            self.membership.join(0.0, rank, "host", 1, "cpu")

    @property
    def proofs(self) -> dict[int, str]:
        return self.exits.among(self.membership.current_workers())


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        yield process
        process.kill()


def test_the_end_of_a_local_process_is_found(child: "subprocess.Popen[bytes]") -> None:
    workers = WorkerProcesses()
    workers.exits.learn(1, process_id())
    workers.exits.learn(2, process_id(child.pid))
    assert workers.proofs == {}
    child.kill()
    child.wait()
    assert workers.proofs == {2: FOUND}


def test_an_unseen_process_counts_as_not_ended(child: "subprocess.Popen[bytes]") -> None:
    """It may run on a copied virtual machine that looks like this system."""
    name = process_id(child.pid)
    child.kill()
    child.wait()
    workers = WorkerProcesses()
    workers.exits.learn(1, name)
    assert workers.proofs == {}


def test_the_parent_of_a_process_may_report_its_end_from_any_host() -> None:
    workers = WorkerProcesses()
    workers.exits.learn(1, "boot/7/100/5")
    workers.exits.learn(2, "boot/7/101/5")
    assert workers.exits.report("boot/7/101/5", "was killed by SIGKILL") == [2]
    assert workers.exits.report("boot/8/101/5", "was killed by SIGKILL") == []
    assert workers.proofs == {2: "was killed by SIGKILL"}


def test_departed_workers_are_dropped(child: "subprocess.Popen[bytes]") -> None:
    workers = WorkerProcesses()
    for worker in (1, 2, 3):
        workers.exits.learn(worker, process_id(child.pid))
    child.kill()
    child.wait()
    workers.membership.members = {}
    assert workers.exits.among([]) == {}
    assert workers.exits.report(process_id(), "ended") == []
    assert workers.proofs == {}
