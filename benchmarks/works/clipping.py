"""What clip_norm costs: the norm of each push, and in a round of several one more exchange
between the servers.
"""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from benchmarks.product import LANES
from benchmarks.scale import Scale
from benchmarks.setup import Setup
from benchmarks.works.entrants import job, ours
from benchmarks.works.work import Lineup, Work

MODES = {"no clip norm": False, "clip norm": True}


def lineup(scale: Scale, resources: ExitStack, large: bool, workers: int) -> Lineup:
    size = Setup(scale.large) if large else Setup(scale.small, "1", pieces=scale.small_pieces)
    jobs = replace(size, optimizer="adam", servers=2, workers=workers)
    entries = [
        job(ours(lane, mode), replace(jobs, lanes=lane, clips=clips))
        for lane in LANES
        for mode, clips in MODES.items()
    ]
    return Lineup(entries)


ABOUT = "2 servers, Adam, sync: without a clip norm, and with one that no gradient exceeds."
LARGE = Work(
    "clipping", f"push_pull of 100 MB, 2 workers, {ABOUT}", partial(lineup, large=True, workers=2)
)
SMALL = Work(
    "clipping_small",
    f"push_pull of 50 kB, 2 workers, {ABOUT}",
    partial(lineup, large=False, workers=2),
)
ALONE = Work(
    "clipping_alone",
    f"push_pull of 100 MB, 1 worker, {ABOUT}",
    partial(lineup, large=True, workers=1),
)
