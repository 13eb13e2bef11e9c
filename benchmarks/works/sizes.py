"""Throughput by lane and size."""

from contextlib import ExitStack

from benchmarks.product import LANES
from benchmarks.scale import Scale
from benchmarks.setup import BYTES_PER_MEGABYTE, Setup
from benchmarks.works.entrants import GLOO, STREAM, job, ours, peer
from benchmarks.works.work import Lineup, Work

TURN_BYTES = 100 * BYTES_PER_MEGABYTE
"""Bytes of one turn; small models do several pieces per turn."""

MAX_PIECES = 50


def sized(name: str, nbytes: int) -> str:
    """The contender's name."""
    return f"{name}, {nbytes / BYTES_PER_MEGABYTE:g} MB"


def lineup(scale: Scale, resources: ExitStack) -> Lineup:
    entries = []
    for nbytes in scale.sizes:
        pieces = max(1, min(MAX_PIECES, TURN_BYTES // nbytes)) if scale.name == "full" else 1
        setup = Setup(nbytes, pieces=pieces)
        entries += [
            job(sized(ours(lane), nbytes), Setup(nbytes, pieces=pieces, lanes=lane))
            for lane in LANES
        ]
        entries += [
            peer(sized(STREAM, nbytes), "grpc_stream", setup),
            peer(sized(GLOO, nbytes), "gloo", setup, "reduce"),
        ]
    return Lineup(entries)


WORK = Work(
    "sizes",
    "Push and pull of models of 1 to 256 MB in 160 tensors (SGD; 1 worker, 1 server) by lane, "
    "beside the bare stream and gloo.",
    lineup,
)
