"""Where the time of a training step goes."""

from contextlib import ExitStack

from benchmarks.product import LANES
from benchmarks.scale import Scale
from benchmarks.setup import Setup
from benchmarks.works.entrants import job, team
from benchmarks.works.work import Lineup, Work

WORKERS = (1, 2)


def lineup(scale: Scale, resources: ExitStack) -> Lineup:
    entries = [
        job(
            team(lane, workers),
            Setup(scale.trained, optimizer="adam", workers=workers, lanes=lane, pieces=3),
            "training",
        )
        for lane in LANES
        for workers in WORKERS
    ]
    return Lineup(entries)


WORK = Work(
    "phases",
    "A training step of a multilayer perceptron (32 layers, 40 MB, batches of 64, Adam; sync, 1 "
    "server) by phase, as job.stats tells them.",
    lineup,
)
