"""Number 9: one worker's pulls while another pushes without pause."""

from contextlib import ExitStack

from benchmarks.product import LANES
from benchmarks.scale import Scale
from benchmarks.setup import Setup
from benchmarks.works.entrants import ours, peer
from benchmarks.works.work import Lineup, Work


def lineup(scale: Scale, resources: ExitStack) -> Lineup:
    entries = [
        peer(
            ours(lane, f"{word} server"),
            "tail",
            Setup(
                scale.medium,
                optimizer="adam",
                workers=2,
                policy="async",
                lanes=lane,
                pieces=scale.pulls,
            ),
            word=word,
        )
        for lane in LANES
        for word in ("idle", "busy")
    ]
    return Lineup(entries)


WORK = Work(
    "tail",
    "Pulls of one worker (4 MB model, async, Adam), while the server is idle and while another "
    "worker pushes without pause; p99 of each round.",
    lineup,
)
