"""Goodput, compared with an account that the workers write while they are killed."""

import statistics
from itertools import pairwise
from pathlib import Path

from tests.support.compared_runs import EPOCHS, PAUSE, SECONDS, SHARDS, WAIT, check_data
from tests.support.forked_job import ForkedJob
from tests.support.killer import DONE, Killer
from tests.support.worker_scripts import train_with_account
from tests.support.workers import status

WORKERS, KILLS = 3, 12
PAUSE_AT = 90
SECONDS_TOLERANCE = 0.05
"""The workers see an update later than shard 0, each at another time."""


class Account:
    """What the workers have written: samples of computed gradients, and ends of updates."""

    def __init__(self, job: ForkedJob) -> None:
        self.wasted = self.unknown = 0
        self.ends: dict[int, float] = {}
        for process in job.all:
            lines = [line.split() for line in process.log.read_text().splitlines()]
            computed = 0
            for kind, *values in (line for line in lines if line):
                if kind == "computed":
                    computed = int(values[0])
                elif kind == "decided":
                    if values[0] != "applied":
                        self.wasted += computed
                    version, at, computed = int(values[1]), float(values[2]), 0
                    self.ends[version] = min(at, self.ends.get(version, at))
            self.unknown += computed  # killed before it knew

    @property
    def seconds(self) -> float:
        ends = [self.ends[version] for version in sorted(self.ends)]
        intervals = [b - a for a, b in pairwise(ends)]
        usual = statistics.median(intervals)
        lost = sum(max(0.0, interval - usual) for interval in intervals)
        return 1 - lost / (ends[-1] - ends[0])


def test_goodput_is_what_the_workers_account_for(tmp_path: Path) -> None:
    """Shard 0, which measures it, is not killed. Backup workers make late pushes."""
    flags = ("--min-workers", WORKERS, "--backup-workers", 1, "--lease", "2s", *WAIT)
    pause = {"pause": PAUSE, "pause_at": PAUSE_AT, "until": tmp_path / DONE}
    with ForkedJob(tmp_path, SHARDS, flags, train_with_account, epochs=EPOCHS, **pause) as job:
        job.start_all(WORKERS)
        killer = Killer(job, seed=1, kills=KILLS, kinds="w")
        job.supervise(job.workers_done, SECONDS, killer)
        check_data(job)
        goodput, counted = status(job.address)["goodput"], status(job.address)["samples"]
        account = Account(job)
    print(f"\n{goodput} {counted} {account.wasted} {account.unknown} {account.seconds:.3f}")

    assert killer.left == 0
    assert account.wasted > 0
    least = counted / (counted + account.wasted + account.unknown)
    assert least <= goodput["samples"] <= counted / (counted + account.wasted)
    assert abs(goodput["seconds"] - account.seconds) < SECONDS_TOLERANCE
