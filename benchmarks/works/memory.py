"""Number 7: the server's memory."""

from contextlib import ExitStack

from benchmarks.product import LANES
from benchmarks.scale import Scale
from benchmarks.setup import Setup
from benchmarks.works.entrants import job, ours
from benchmarks.works.work import Lineup, Work

ADAM_STATE_COUNT = 2
MANY = ours("grpc", "many clients")
"""The crowd's name."""


def steps(scale: Scale, resources: ExitStack) -> Lineup:
    def setup(lane: str) -> Setup:
        return Setup(
            scale.memory_nbytes,
            optimizer="adam",
            lanes=lane,
            pieces=scale.memory_steps,
            in_flight=scale.in_flight,
        )

    entries = [job(ours(lane), setup(lane)) for lane in LANES]
    return Lineup(entries, facts=facts(scale))


def crowd(scale: Scale, resources: ExitStack) -> Lineup:
    setup = Setup(
        scale.memory_nbytes,
        optimizer="adam",
        policy="async",
        clients=scale.crowd,
        in_flight=scale.in_flight,
    )
    return Lineup([job(MANY, setup, "crowd")], facts=facts(scale), rounds=scale.crowd_rounds)


def facts(scale: Scale) -> dict[str, float]:
    """allowed: bytes of weights, optimizer state and the budget."""
    return {"allowed": scale.memory_nbytes * (1 + ADAM_STATE_COUNT) + scale.in_flight}


STEPS = Work(
    "memory",
    "The server's resident memory at its peak in each round, beyond that of a server without a "
    "model: 400 MB model, Adam, 1 worker, 20 steps a round. What a worker shares with it through "
    "shared memory is the worker's and shown apart.",
    steps,
)
CROWD = Work(
    "memory_crowd",
    "The same with 64 clients that all push 400 MB at once (async), over gRPC.",
    crowd,
)
