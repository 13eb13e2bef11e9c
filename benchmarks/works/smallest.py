"""Number 4: the smallest step."""

from contextlib import ExitStack

from benchmarks.product import LANES
from benchmarks.scale import Scale
from benchmarks.setup import Setup
from benchmarks.works.entrants import (
    CALL,
    EMPTY_CALL,
    job,
    no_tensorflow,
    ours,
    peer,
    tensorflow,
)
from benchmarks.works.work import Lineup, Work


def lineup(scale: Scale, resources: ExitStack) -> Lineup:
    def setup(lane: str) -> Setup:
        return Setup(scale.small, model="1", pieces=scale.small_pieces, lanes=lane)

    entries = [job(ours(lane), setup(lane)) for lane in LANES]
    entries += [
        peer(CALL, "grpc_unary", setup("grpc")),
        peer(EMPTY_CALL, "grpc_unary", setup("grpc"), word="empty"),
        *tensorflow(scale, setup("grpc"), "coordinator"),
    ]
    return Lineup(entries, no_tensorflow(scale))


WORK = Work(
    "smallest",
    "A step of a 50 kB model (one tensor, SGD), 1 worker, sync. The bare call moves 50 kB each "
    "way; the empty one moves nothing.",
    lineup,
    quick=True,
)
