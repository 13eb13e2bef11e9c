"""What it costs to write everything down: a log of all pushes and entries against none."""

from contextlib import ExitStack

from benchmarks.product import LANES
from benchmarks.scale import Scale
from benchmarks.setup import Setup
from benchmarks.works.entrants import job, ours
from benchmarks.works.work import Lineup, Work

MODES = {
    "no log": ("snapshot", "no"),
    "log": ("log", "everysec"),
    "log, fsync always": ("log", "always"),
}


def lineup(scale: Scale, resources: ExitStack) -> Lineup:
    entries = [
        job(
            ours(lane, mode),
            Setup(scale.large, lanes=lane, durability=durability, fsync=fsync, pieces=scale.logged),
        )
        for lane in LANES
        for mode, (durability, fsync) in MODES.items()
    ]
    return Lineup(entries)


WORK = Work(
    "durability",
    "push_pull of 100 MB, 1 worker, 1 server, SGD: without a log, with one that is synced every "
    "second, and with one that is synced before each answer. A turn is as many pushes as a log "
    "holds before a snapshot takes its place, so it has the costs of that snapshot too; the files "
    "of the log are recycled by then.",
    lineup,
)
