"""Workers that stop, are slow, drain or join during training: the job continues without loss."""

import signal
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.requests import DRAIN, Stub
from psproto.v1 import coordinator_pb2 as co
from tests.support.counted_steps import LEASE, PAUSE, check_data, job, steps, wait_for_steps
from tests.support.forked_job import ForkedJob
from tests.support.machine_time import machine_seconds
from tests.support.process_job import state_of
from tests.support.workers import status, until

pytestmark = pytest.mark.timing

STEP = 0.2
"""Seconds of one step on a busy machine."""
SECONDS = 100


def longest_stall(times: list[float]) -> float:
    """Return the longest time between two steps, without pauses of the machine."""
    return max(machine_seconds(a, b) for a, b in pairwise(times))


def test_a_stopped_worker_is_dropped_and_rejoins_as_a_new_worker(tmp_path: Path) -> None:
    with job(tmp_path, "--min-workers", 2, epochs=12) as job_processes:
        job_processes.start_all(2)
        wait_for_steps(job_processes, 5, "w1")
        stopped = job_processes.processes["w1"]
        stopped.send(signal.SIGSTOP)
        assert stopped.process.pid is not None
        until(lambda: state_of(stopped.process.pid or 0) == "T", "a stopped worker")
        steps_before = len(steps(job_processes, "w0"))
        wait_for_steps(job_processes, steps_before + 20, "w0")
        assert {row["state"] for row in status(job_processes.address)["workers"]} == {
            "active",
            "lost",
        }

        stopped.send(signal.SIGCONT)
        job_processes.supervise(job_processes.workers_done, SECONDS)

        assert longest_stall(steps(job_processes, "w0")) < LEASE + STEP
        check_data(job_processes)
    assert "rejoin_started" in stopped.log.read_text()
    assert stopped.log.read_text().count("step ") > 5


def test_training_continues_while_workers_join_drain_and_crash(tmp_path: Path) -> None:
    """One, four, then two workers train; the only pause is the lease of the killed worker."""
    with job(tmp_path, "--min-workers", 1, epochs=30) as job_processes:
        job_processes.start("s0", "w0")
        wait_for_steps(job_processes, 5)
        job_processes.start("w1", "w2", "w3")
        (
            wait_for_steps(job_processes, 10, "w1"),
            wait_for_steps(job_processes, 10, "w2"),
            wait_for_steps(job_processes, 10, "w3"),
        )
        workers = {row["rank"]: row["worker"] for row in status(job_processes.address)["workers"]}
        drain(job_processes.address, workers[1])
        job_processes.processes["w2"].kill()
        until(lambda: job_processes.processes["w1"].exit_code == 0, "a drained worker")
        del job_processes.processes["w2"]
        job_processes.supervise(job_processes.workers_done, SECONDS)

        assert longest_stall(steps(job_processes)) < LEASE + STEP
        check_data(job_processes)
        states = {row["rank"]: row["state"] for row in status(job_processes.address)["workers"]}
    assert states == {0: "left", 1: "left", 2: "lost", 3: "left"}


def test_joining_takes_at_most_a_second(tmp_path: Path) -> None:
    """From the call of `connect` to the first step while others train; the fastest of four
    workers.
    """
    with job(tmp_path, "--min-workers", 1, epochs=80) as job_processes:
        job_processes.start("s0", "w0")
        wait_for_steps(job_processes, 5)
        seconds = []
        for name in ("w1", "w2", "w3", "w4"):
            job_processes.start(name)
            wait_for_steps(job_processes, 1, name)
            seconds.append(
                machine_seconds(
                    first_log_time(job_processes, name, "connects"), steps(job_processes, name)[0]
                )
            )
            drain(job_processes.address, status(job_processes.address)["workers"][-1]["worker"])
    print(f"joining took {', '.join(f'{each:.2f}' for each in seconds)} s")

    assert min(seconds) < 1.0 + 2 * PAUSE


def first_log_time(job: ForkedJob, name: str, word: str) -> float:
    """Return the first time at which a worker logged this word."""
    return next(
        float(line.split()[1])
        for line in job.processes[name].log.read_text().splitlines()
        if line.startswith(word)
    )


def drain(address: str, worker: int) -> None:
    with closing(open_channel(Endpoint(address))) as channel:
        Stub(channel, DRAIN)(co.DrainRequest(worker=worker), timeout=10)


def test_a_backup_worker_hides_a_slow_worker_without_loss(tmp_path: Path) -> None:
    """The job without backup worker runs at the same time, so that load on the machine affects
    both.
    """
    (tmp_path / "with").mkdir(), (tmp_path / "without").mkdir()
    options = {"epochs": 16, "slow": {2: 10 * PAUSE}}
    backup = ("--min-workers", 3, "--backup-workers", 1)
    with (
        job(tmp_path / "with", *backup, **options) as slowed,
        job(tmp_path / "without", "--min-workers", 2, **options) as baseline,
    ):
        slowed.start_all(3)
        baseline.start_all(2)
        slowed.supervise(slowed.workers_done, SECONDS)
        baseline.supervise(baseline.workers_done, SECONDS)
        seconds = [seconds_per_step(each) for each in (slowed, baseline)]
        check_data(slowed)

    print(f"a step took {seconds[0] / seconds[1]:.2f} times as long")
    assert seconds[0] <= 1.1 * seconds[1]


def seconds_per_step(job: ForkedJob) -> float:
    """Return the first worker's seconds per step, without its first and last steps."""
    wait_for_steps = steps(job, "w0")[10:-5]
    return (wait_for_steps[-1] - wait_for_steps[0]) / (len(wait_for_steps) - 1)
