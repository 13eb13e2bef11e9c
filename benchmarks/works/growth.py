"""Number 10: what a push costs the server as workers come in."""

from contextlib import ExitStack

from benchmarks.product import LANES
from benchmarks.scale import Scale
from benchmarks.setup import Setup
from benchmarks.works.entrants import job, team
from benchmarks.works.work import Lineup, Work


def lineup(scale: Scale, resources: ExitStack) -> Lineup:
    entries = [
        job(
            team(lane, workers),
            Setup(scale.medium, workers=workers, policy="async", lanes=lane, pieces=max(1, scale.pushes // workers)),
        )
        for lane in LANES
        for workers in scale.growth
    ]
    return Lineup(entries)


WORK = Work(
    "growth",
    "Workers that push and pull a 4 MB model at once, each as fast as it can (async, SGD, 1 server): the server's CPU "
    "seconds a push.",
    lineup,
)
