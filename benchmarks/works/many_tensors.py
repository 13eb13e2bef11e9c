"""Number 5: many small tensors against one of the same bytes."""

from contextlib import ExitStack

from benchmarks.product import LANES
from benchmarks.scale import Scale
from benchmarks.setup import Setup
from benchmarks.works.entrants import job, ours
from benchmarks.works.work import Lineup, Work

LEVELS = {"exchange": "tape", "modules": "optimizer.step"}
"""Kinds of workers, and what they are called in the results."""


def lineup(scale: Scale, resources: ExitStack) -> Lineup:
    counts = {"many": str(scale.many_tensors), "one": "1"}
    entries = [
        job(ours(lane, f"{level}, {name}"), Setup(scale.many, model=tensors, lanes=lane), kind)
        for lane in LANES
        for kind, level in LEVELS.items()
        for name, tensors in counts.items()
    ]
    return Lineup(entries)


WORK = Work(
    "many_tensors",
    "40 MB in 10 000 tensors against 40 MB in one: push and pull of a tape "
    "(ModelExchange.exchange), and optimizer.step() of a torch model; 1 worker, 1 server, SGD.",
    lineup,
)
