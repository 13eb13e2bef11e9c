"""Time of a push and pull by transport and size."""

from contextlib import ExitStack
from dataclasses import replace

from benchmarks.product import LANES
from benchmarks.rounds import Entry
from benchmarks.scale import Scale
from benchmarks.setup import BYTES_PER_MEGABYTE, Setup
from benchmarks.works.entrants import GLOO, RPC_TCP, STREAM, TCP, job, ours, peer
from benchmarks.works.work import Lineup, Work

TURN_BYTES = 100 * BYTES_PER_MEGABYTE
"""Bytes of one turn; small models do several pieces per turn."""

MAX_PIECES = 200

MIN_RESNET_BYTES = 400_000
"""Smaller models have SMALL_TENSORS equal tensors."""

SMALL_TENSORS = "10"

MAX_PEER_BYTES = 500 * BYTES_PER_MEGABYTE
"""Largest model beside all peers: the memory holds no larger ones at a time."""


def sized(name: str, nbytes: int) -> str:
    """The contender's name."""
    return f"{name}, {nbytes / BYTES_PER_MEGABYTE:g} MB"


def entries_of(scale: Scale, nbytes: int) -> list[Entry]:
    """Return the contenders with a model of this size."""
    pieces = max(1, min(MAX_PIECES, TURN_BYTES // nbytes)) if scale.name == "full" else 1
    model = "resnet" if nbytes >= MIN_RESNET_BYTES else SMALL_TENSORS
    setup = Setup(nbytes, model=model, pieces=pieces)
    lanes = [job(sized(ours(lane), nbytes), replace(setup, lanes=lane)) for lane in LANES]
    tcp = peer(sized(TCP, nbytes), "plain_tcp", setup)
    if nbytes > MAX_PEER_BYTES:
        return [*lanes, tcp]
    return [
        *lanes,
        tcp,
        peer(sized(STREAM, nbytes), "grpc_stream", setup),
        peer(sized(GLOO, nbytes), "gloo", replace(setup, workers=2), "reduce"),
        peer(sized(RPC_TCP, nbytes), "torch_rpc", setup, "tcp", spins=True),
    ]


def work(name: str, group: int, range_text: str) -> Work:
    """Return the work with one group of `Scale.sizes`; all its contenders are in memory."""

    def lineup(scale: Scale, resources: ExitStack) -> Lineup:
        return Lineup([entry for n in scale.sizes[group] for entry in entries_of(scale, n)])

    return Work(
        name,
        f"Push and pull of models of {range_text} (SGD; 1 worker, 1 server; 160 tensors, 10 below "
        "0.4 MB) by lane, beside the peers of the large model; at 1 GB only beside plain TCP, for "
        "lack of memory.",
        lineup,
    )


SMALL = work("sizes_small", 0, "1 kB to 1 MB")
LARGE = work("sizes_large", 1, "10 and 100 MB")
HUGE = work("sizes_huge", 2, "1 GB")
