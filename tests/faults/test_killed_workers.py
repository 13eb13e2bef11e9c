"""Workers killed on a host with a server: the death is proven at once, without waiting for a
lease.
"""

import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest

from pscommon.core.exit_codes import ExitCode
from tests.support.counted_steps import check_data, steps, wait_for_steps
from tests.support.forked_job import ForkedJob
from tests.support.machine_time import machine_seconds
from tests.support.process_job import state_of
from tests.support.worker_scripts import train
from tests.support.workers import status, until

pytestmark = pytest.mark.timing

LEASE = 20.0
"""Much longer than these tests allow for the detection of a death."""
WITHIN = 1.0
"""Seconds within which the other workers continue."""
PAUSE = 0.05
SECONDS = 100


def job(folder: Path, shards: int, *flags: object) -> ForkedJob:
    settings = ("--lease", f"{LEASE:g}s", "--min-workers", 2, *flags)
    return ForkedJob(folder, shards, settings, train, pause=PAUSE, epochs=12)


def worker_rows(job_processes: ForkedJob) -> dict[int, dict[str, object]]:
    """Return the status rows of workers by number."""
    return {row["worker"]: row for row in status(job_processes.address)["workers"]}


@pytest.mark.parametrize("shards", [1, 2])
def test_sync_shrinks_within_a_second_after_a_worker_is_killed(tmp_path: Path, shards: int) -> None:
    with job(tmp_path, shards) as job_processes:
        job_processes.start_all(2)
        wait_for_steps(job_processes, 5, "w1")
        killed_at = time.monotonic()
        job_processes.processes["w1"].kill()
        steps_before = len(steps(job_processes, "w0"))
        wait_for_steps(job_processes, steps_before + 20, "w0")
        del job_processes.processes["w1"]
        job_processes.supervise(job_processes.workers_done, SECONDS)

        stall = max(machine_seconds(a, b) for a, b in pairwise(steps(job_processes, "w0")))
        print(f"\n{shards} shards: the others stood still for {stall:.2f} s after a kill")
        assert stall < WITHIN
        assert time.monotonic() - killed_at < LEASE
        (lost,) = (row for row in worker_rows(job_processes).values() if row["rank"] == 1)
        assert (lost["state"], lost["reason"]) == ("lost", "its process has ended")
        check_data(job_processes)


def test_with_wait_a_restarted_worker_replaces_a_killed_one_at_once(tmp_path: Path) -> None:
    """This needs no launcher that counts attempts. The other worker does not train meanwhile."""
    with job(tmp_path, 1, "--on-worker-loss", "wait:60s") as job_processes:
        job_processes.start_all(2)
        wait_for_steps(job_processes, 5, "w1")
        killed = job_processes.processes["w1"]
        killed.kill()
        killed.attempt = -1  # the next process is attempt 0 again
        until(
            lambda: "worker_silent" in job_processes.processes["s0"].log.read_text(),
            "a lost worker that the job waits for",
        )
        steps_before = len(steps(job_processes, "w0"))
        started_at = time.monotonic()
        job_processes.start("w1")
        wait_for_steps(job_processes, steps_before + 5, "w0")
        assert time.monotonic() - started_at < LEASE / 2
        job_processes.supervise(job_processes.workers_done, SECONDS)

        (lost,) = (row for row in worker_rows(job_processes).values() if row["state"] == "lost")
        assert "was started in its place" in str(lost["reason"])
        check_data(job_processes)


def test_with_abort_the_job_ends_at_once_after_a_worker_is_killed(tmp_path: Path) -> None:
    with job(tmp_path, 2, "--on-worker-loss", "abort") as job_processes:
        job_processes.start_all(2)
        wait_for_steps(job_processes, 5, "w1")
        job_processes.processes["w1"].kill()
        killed_at = time.monotonic()
        until(
            lambda: all(
                job_processes.processes[name].exit_code is not None for name in ("w0", "s0", "s1")
            ),
            "the end of all",
        )
        print(f"\nthe job ended {time.monotonic() - killed_at:.2f} s after a kill")

        assert time.monotonic() - killed_at < LEASE / 2
        assert job_processes.processes["s0"].exit_code == ExitCode.TOO_FEW_WORKERS
        for name in ("s0", "w0"):
            assert (
                "its process has ended (--on-worker-loss abort)"
                in job_processes.processes[name].log.read_text()
            )


def test_a_stopped_worker_stays_active_until_its_lease_ends(tmp_path: Path) -> None:
    """Broken connections do not end the membership of a worker whose process exists."""
    with job(tmp_path, 1) as job_processes:
        job_processes.start_all(2)
        wait_for_steps(job_processes, 5, "w1")
        stopped = job_processes.processes["w1"]
        stopped.send(signal.SIGSTOP)
        assert stopped.process.pid is not None
        until(lambda: state_of(stopped.process.pid or 0) == "T", "a stopped worker")
        waiting_since = time.monotonic()
        until(
            lambda: time.monotonic() - waiting_since > 2 * WITHIN, "several checks of the process"
        )
        assert {row["state"] for row in worker_rows(job_processes).values()} == {"active"}

        stopped.send(signal.SIGCONT)
        job_processes.supervise(job_processes.workers_done, SECONDS)
        assert {row["state"] for row in worker_rows(job_processes).values()} == {"left"}
        check_data(job_processes)
