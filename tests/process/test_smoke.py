"""Each policy, crash recovery, failover and reshard once, with real processes. Faults in depth
are in tests/faults.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.programs import Programs, programs_in
from tests.e2e.workers import counted, status, until, weights_of
from tests.faults.exactly_once import POLICIES, check, run
from tests.faults.forked import ForkedJob
from tests.faults.scripts import count
from tests.faults.standbys import StandbyJob
from tests.support.pushes_over_failover import FLAGS, finish, goes_on, running

PUSHES = 200


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as programs:
        yield programs


@pytest.mark.parametrize("policy", POLICIES)
def test_each_push_counts_once_although_both_servers_are_killed(
    policy: str, tmp_path: Path
) -> None:
    """Servers recover from their logs; requests and replies are lost and repeated."""
    check(run(tmp_path, policy, PUSHES), policy, PUSHES)


@pytest.mark.timing
def test_a_standby_takes_over_from_a_killed_primary(tmp_path: Path) -> None:
    with StandbyJob(tmp_path, 2, (*POLICIES["sync"], *FLAGS), count, pushes=10**6) as job:
        running(job, 0)
        job.lives["s0"].kill()
        goes_on(job, time.monotonic())
        finish(job, "sync")


def test_a_running_job_gets_more_servers_and_fewer(programs: Programs) -> None:
    """By ps-ctl: no push is lost or counted twice."""
    flags = (*POLICIES["async"], "--min-workers", 2, "--durability", "log")
    with ForkedJob(
        programs.folder, 2, flags, count, pushes=400, lanes=("grpc", "shm"), pause=0.01
    ) as job:
        job.start_all(2)
        first = job.address.partition(",")[0]
        until(lambda: status(first)["version"] > 0, "pushes")
        job.add_servers(3)
        for shards in (3, 1):
            moved = programs.run("ps-ctl", "--ps", first, "reshard", "--servers", shards)
            assert moved.wait() == 0, moved.said
            assert len(status(first)["servers"]) == shards
        job.tend(job.workers_done, 60)

        assert counted(weights_of(first)) == status(first)["version"] == 800
        assert "fenced 0" in job.said()
