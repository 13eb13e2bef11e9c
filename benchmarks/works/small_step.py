"""Number 17: a small step in async, with one and with two servers."""

from contextlib import ExitStack

from benchmarks.product import LANES
from benchmarks.scale import Scale
from benchmarks.setup import Setup
from benchmarks.works.entrants import CALL, TCP, job, no_tensorflow, ours, peer, tensorflow
from benchmarks.works.work import Lineup, Work

TENSORS = "26"
LEVELS = {"arrays": "arrays", "modules": "optimizer.step", "loader": "optimizer.step with a loader"}
"""Kinds of workers, and what they are called in the results."""


def name(lane: str, servers: int) -> str:
    """Return a contender's name."""
    return ours(lane, f"{servers} server" + "s" * (servers > 1))


def lineup(scale: Scale, resources: ExitStack) -> Lineup:
    def setup(lane: str, servers: int = 1) -> Setup:
        return Setup(
            scale.small,
            model=TENSORS,
            servers=servers,
            policy="async",
            pieces=scale.small_pieces,
            lanes=lane,
        )

    entries = [job(name(lane, n), setup(lane, n)) for lane in LANES for n in (1, 2)]
    entries += [
        job(ours(lane, level), setup(lane), kind)
        for lane in LANES
        for kind, level in LEVELS.items()
    ]
    entries += [
        peer(CALL, "grpc_unary", setup("grpc")),
        peer(TCP, "plain_tcp", setup("grpc")),
        *tensorflow(scale, setup("grpc"), "coordinator"),
    ]
    return Lineup(entries, no_tensorflow(scale))


WORK = Work(
    "small_step",
    "A step of a 50 kB model in 26 arrays (async, SGD, 1 worker), with one and with two servers, "
    "from flat buffers. With one server also push_pull of 26 numpy arrays, and optimizer.step() of "
    "a torch model, alone and with a batch of `job.batches` for each step. The bare call moves "
    "50 kB each way; plain TCP also applies SGD.",
    lineup,
    quick=True,
)
