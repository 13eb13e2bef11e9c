"""What a snapshot costs those who train while it is written."""

from contextlib import ExitStack

from benchmarks.product import LANES
from benchmarks.scale import Scale
from benchmarks.setup import Setup
from benchmarks.works.entrants import ours, peer
from benchmarks.works.work import Lineup, Work

QUIET, SAVING = "quiet", "while a snapshot is written"


def lineup(scale: Scale, resources: ExitStack) -> Lineup:
    return Lineup(
        [
            peer(
                ours(lane, what),
                "snapshots",
                Setup(scale.large, lanes=lane, durability="snapshot", pieces=scale.saved_steps),
                word=word,
            )
            for lane in LANES
            for word, what in (("quiet", QUIET), ("saving", SAVING))
        ]
    )


WORK = Work(
    "snapshots",
    "A worker that pushes and pulls 100 MB again and again, SGD, and now and then only pulls; "
    "quiet, and while snapshots are written. lost: seconds that one snapshot costs; pause: the "
    "longest step beyond the longest of a quiet turn.",
    lineup,
)
