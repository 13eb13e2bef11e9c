"""The curves of a job go on after a failover of shard 0."""

import time
from pathlib import Path

from tests.support.curves import curves
from tests.support.pushes_over_failover import (
    FLAGS,
    POLICIES,
    start_in_sync,
    stop_and_check,
    wait_for_pushes,
    wait_until,
)
from tests.support.standby_job import StandbyJob
from tests.support.worker_scripts import count

RATE = "job/learning_rate"


def test_the_standby_of_shard_0_continues_the_curves(tmp_path: Path) -> None:
    folder = tmp_path / "curves"
    flags = (*POLICIES["async"], *FLAGS, "--tensorboard", folder)

    def steps() -> list[int]:
        return [step for step, _ in curves(folder).get(RATE, [])]

    with StandbyJob(tmp_path, 2, flags, count, pushes=10**6) as job:
        start_in_sync(job, 0)
        wait_until(job, lambda: len(steps()) > 1, "a curve")
        job.processes["s0"].kill()
        before = steps()
        wait_for_pushes(job, time.monotonic())
        wait_until(job, lambda: steps()[-1] > before[-1], "a longer curve")
        found = steps()
        stop_and_check(job, "async")

    # the newest point may be of an update that the standby did not have
    assert found[: len(before) - 1] == before[:-1]
    assert found == sorted({*found})
    assert len([*folder.iterdir()]) == 2
