"""Synchronous workers on one host, beside all_reduce among as many processes."""

from contextlib import ExitStack
from dataclasses import replace

from benchmarks.rounds import Entry
from benchmarks.scale import Scale
from benchmarks.setup import Setup
from benchmarks.works.entrants import ALL_REDUCE, job, peer, team, with_workers
from benchmarks.works.work import Lineup, Work

LANES = ("stream", "shm")
ABOUT = (
    "of each worker at once, and the mean's new weights for all (sync, SGD, 1 server, all on this "
    "machine). gloo sums the same bytes and applies nothing."
)


def entries(scale: Scale, setup: Setup) -> list[Entry]:
    """Return the contenders with each number of workers; a turn has fewer pieces with more."""
    found = []
    for workers in scale.growth:
        each = replace(setup, workers=workers, pieces=max(2, setup.pieces // workers))
        found += [job(team(lane, workers), replace(each, lanes=lane)) for lane in LANES]
        if workers > 1:
            found.append(peer(with_workers(ALL_REDUCE, workers), "gloo", each, "reduce"))
    return found


def small(scale: Scale, resources: ExitStack) -> Lineup:
    return Lineup(entries(scale, Setup(scale.small, "26", pieces=scale.small_pieces)))


def large(scale: Scale, resources: ExitStack) -> Lineup:
    return Lineup(entries(scale, Setup(scale.joint, pieces=scale.small_pieces // 10)))


SMALL = Work("workers_small", f"50 kB of gradients {ABOUT}", small)
LARGE = Work("workers_large", f"10 MB of gradients {ABOUT}", large)
