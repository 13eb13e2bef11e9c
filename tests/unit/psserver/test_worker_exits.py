"""Proofs that workers' processes have ended: found or reported, and never of a process that was
not seen.
"""

import subprocess
from collections.abc import Iterator

import pytest

from pscommon.system.process_id import process_id
from psserver.core.workers.membership import Membership
from psserver.process.worker_exits import FOUND, WorkerExits


class Crew:
    """Workers 1 to 3, and what is known of their processes."""

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
    crew = Crew()
    crew.exits.learn(1, process_id())
    crew.exits.learn(2, process_id(child.pid))
    assert crew.proofs == {}
    child.kill()
    child.wait()
    assert crew.proofs == {2: FOUND}


def test_a_process_that_was_never_seen_here_is_not_missed(child: "subprocess.Popen[bytes]") -> None:
    """It may run on a system that looks like this one: a virtual machine that was copied while
    it ran.
    """
    name = process_id(child.pid)
    child.kill()
    child.wait()
    crew = Crew()
    crew.exits.learn(1, name)
    assert crew.proofs == {}


def test_who_started_a_process_may_report_its_end_from_anywhere() -> None:
    crew = Crew()
    crew.exits.learn(1, "boot/7/100/5")
    crew.exits.learn(2, "boot/7/101/5")
    assert crew.exits.report("boot/7/101/5", "was killed by SIGKILL") == [2]
    assert crew.exits.report("boot/8/101/5", "was killed by SIGKILL") == []
    assert crew.proofs == {2: "was killed by SIGKILL"}


def test_workers_that_left_are_forgotten(child: "subprocess.Popen[bytes]") -> None:
    crew = Crew()
    for worker in (1, 2, 3):
        crew.exits.learn(worker, process_id(child.pid))
    child.kill()
    child.wait()
    crew.membership.members = {}
    assert crew.exits.among([]) == {}
    assert crew.exits.report(process_id(), "ended") == []
    assert crew.proofs == {}
