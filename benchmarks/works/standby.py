"""What a hot standby costs: everything travels to another process before it is acknowledged."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from benchmarks.product import LANES
from benchmarks.scale import Scale
from benchmarks.setup import Setup
from benchmarks.works.entrants import job, ours
from benchmarks.works.work import Lineup, Work

MODES = {"no standby": False, "standby": True}


def lineup(scale: Scale, resources: ExitStack, large: bool) -> Lineup:
    size = (
        Setup(scale.large, pieces=scale.logged)
        if large
        else Setup(scale.small, "1", pieces=scale.small_pieces)
    )
    entries = [
        job(ours(lane, mode), replace(size, lanes=lane, standby=standby))
        for lane in LANES
        for mode, standby in MODES.items()
    ]
    return Lineup(entries)


ABOUT = (
    "1 worker, 1 server, SGD, all on this machine: without a standby, and with one that has each "
    "push before it is acknowledged"
)
LARGE = Work(
    "standby",
    f"push_pull of 100 MB, {ABOUT}.",
    partial(lineup, large=True),
)
SMALL = Work(
    "standby_small",
    f"push_pull of 50 kB, {ABOUT}.",
    partial(lineup, large=False),
)
