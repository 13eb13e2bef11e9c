"""Number 3: two workers, two servers, Adam, against what DDP does."""

from contextlib import ExitStack

from benchmarks.product import LANES
from benchmarks.scale import Scale
from benchmarks.setup import Setup
from benchmarks.works.entrants import GLOO_ADAM, job, ours, peer
from benchmarks.works.work import Lineup, Work


def lineup(scale: Scale, resources: ExitStack) -> Lineup:
    def setup(lane: str) -> Setup:
        return Setup(scale.large, optimizer="adam", servers=2, workers=2, lanes=lane)

    entries = [job(ours(lane), setup(lane)) for lane in LANES]
    entries.append(peer(GLOO_ADAM, "gloo", setup("grpc"), "adam"))
    return Lineup(entries)


WORK = Work(
    "two_workers",
    "The mean of two workers' gradients (100 MB each), Adam, new weights for both; sync, 2 "
    "servers. The peer's two "
    "workers sum one flat tensor with gloo, divide it, and run torch's fused Adam each.",
    lineup,
    quick=True,
)
