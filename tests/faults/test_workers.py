"""Workers that are stopped, slow, asked to leave, or come while others train: the job goes on,
and loses nothing.
"""

import signal
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from pscommon.wire.channel import open_channel
from psproto.v1 import coordinator_pb2 as co
from psproto.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tests.support.counted_steps import LEASE, PAUSE, check_data, job, made, steps
from tests.support.forked_job import ForkedJob
from tests.support.machine_time import machine_seconds
from tests.support.process_job import state_of
from tests.support.workers import status, until

pytestmark = pytest.mark.timing

STEP = 0.2
"""Seconds that a step takes, on a busy machine: between two steps there is one in any case."""
SECONDS = 100


def stalls(times: list[float]) -> float:
    """The longest time in which the machine ran and nobody made a step."""
    return max(machine_seconds(a, b) for a, b in pairwise(times))


def test_a_stopped_worker_is_left_behind_and_comes_back_as_new(tmp_path: Path) -> None:
    with job(tmp_path, "--min-workers", 2, epochs=12) as running:
        running.start_all(2)
        made(running, 5, "w1")
        stopped = running.lives["w1"]
        stopped.send(signal.SIGSTOP)
        assert stopped.process.pid is not None
        until(lambda: state_of(stopped.process.pid or 0) == "T", "a stopped worker")
        before = len(steps(running, "w0"))
        made(running, before + 20, "w0")
        assert {row["state"] for row in status(running.address)["workers"]} == {"active", "lost"}

        stopped.send(signal.SIGCONT)
        running.tend(running.workers_done, SECONDS)

        assert stalls(steps(running, "w0")) < LEASE + STEP
        check_data(running)
    assert "rejoin_started" in stopped.log.read_text()
    assert stopped.log.read_text().count("step ") > 5


def test_workers_come_and_go_while_others_train(tmp_path: Path) -> None:
    """1, 4, 2: somebody always trains, but for the lease of the one that was killed."""
    with job(tmp_path, "--min-workers", 1, epochs=30) as running:
        running.start("s0", "w0")
        made(running, 5)
        running.start("w1", "w2", "w3")
        made(running, 10, "w1"), made(running, 10, "w2"), made(running, 10, "w3")
        workers = {row["rank"]: row["worker"] for row in status(running.address)["workers"]}
        drain(running.address, workers[1])
        running.lives["w2"].kill()
        until(lambda: running.lives["w1"].ended == 0, "a drained worker")
        del running.lives["w2"]
        running.tend(running.workers_done, SECONDS)

        assert stalls(steps(running)) < LEASE + STEP
        check_data(running)
        states = {row["rank"]: row["state"] for row in status(running.address)["workers"]}
    assert states == {0: "left", 1: "left", 2: "lost", 3: "left"}


def test_joining_takes_a_second_at_most(tmp_path: Path) -> None:
    """From the call of `connect` to the first step in the rounds, with others at work; the
    quickest of four.
    """
    with job(tmp_path, "--min-workers", 1, epochs=80) as running:
        running.start("s0", "w0")
        made(running, 5)
        seconds = []
        for name in ("w1", "w2", "w3", "w4"):
            running.start(name)
            made(running, 1, name)
            seconds.append(
                machine_seconds(said_at(running, name, "connects"), steps(running, name)[0])
            )
            drain(running.address, status(running.address)["workers"][-1]["worker"])
    print(f"joining took {', '.join(f'{each:.2f}' for each in seconds)} s")

    assert min(seconds) < 1.0 + 2 * PAUSE


def said_at(job: ForkedJob, name: str, word: str) -> float:
    """When a worker said so first."""
    return next(
        float(line.split()[1])
        for line in job.lives[name].log.read_text().splitlines()
        if line.startswith(word)
    )


def drain(address: str, worker: int) -> None:
    with closing(open_channel(address)) as channel:
        CoordinatorServiceStub(channel).Drain(co.DrainRequest(worker=worker), timeout=10)


def test_one_slow_worker_costs_little_with_a_backup_and_nothing_is_lost(tmp_path: Path) -> None:
    """Beside the same job without it, which runs at the same time, so that whatever else goes on
    meets both.
    """
    (tmp_path / "with").mkdir(), (tmp_path / "without").mkdir()
    options = {"epochs": 16, "slow": {2: 10 * PAUSE}}
    backup = ("--min-workers", 3, "--backup-workers", 1)
    with (
        job(tmp_path / "with", *backup, **options) as slowed,
        job(tmp_path / "without", "--min-workers", 2, **options) as whole,
    ):
        slowed.start_all(3)
        whole.start_all(2)
        slowed.tend(slowed.workers_done, SECONDS)
        whole.tend(whole.workers_done, SECONDS)
        seconds = [per_step(each) for each in (slowed, whole)]
        check_data(slowed)

    print(f"a step took {seconds[0] / seconds[1]:.2f} times as long")
    assert seconds[0] <= 1.1 * seconds[1]


def per_step(job: ForkedJob) -> float:
    """Seconds between two steps of the first worker, without the first ones and the last."""
    made = steps(job, "w0")[10:-5]
    return (made[-1] - made[0]) / (len(made) - 1)
