"""Number 10: what a push costs the server as workers come in."""

from contextlib import ExitStack
from dataclasses import replace

from benchmarks.product import LANES
from benchmarks.scale import Scale
from benchmarks.setup import Setup
from benchmarks.works.entrants import STREAM, job, peer, team, with_workers
from benchmarks.works.work import Lineup, Work


def lineup(scale: Scale, resources: ExitStack) -> Lineup:
    entries = []
    for workers in scale.growth:
        each = Setup(
            scale.medium, workers=workers, policy="async", pieces=max(1, scale.pushes // workers)
        )
        entries += [job(team(lane, workers), replace(each, lanes=lane)) for lane in LANES]
        entries.append(peer(with_workers(STREAM, workers), "stream_crowd", each))
    return Lineup(entries)


WORK = Work(
    "growth",
    "Workers that push and pull a 4 MB model at once, each as fast as it can (async, SGD, 1 "
    "server): the server's CPU "
    "seconds a push. The bare streams move the same bytes and apply nothing.",
    lineup,
)
