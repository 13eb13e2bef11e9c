"""What a user of DistributedDataParallel asks first: how long a training step takes."""

from contextlib import ExitStack
from dataclasses import replace

from benchmarks.product import LANES
from benchmarks.scale import Scale
from benchmarks.setup import Setup
from benchmarks.works.entrants import DDP, DDP_PLAIN, job, ours, peer
from benchmarks.works.work import Lineup, Work

NUMBERS = {"mlp": 5_297_418, "cnn": 1_199_882, "small": 4_780}
"""Of parameters, by network."""

TITLES = {"mlp": "MLP of 5.3 M", "cnn": "CNN of 1.2 M", "small": "5 k parameters"}
BATCH_SIZE = 32
SMALL_STEPS_PER_STEP = 10
"""Steps of the small network for one of another: they are short."""


def name(contender: str, network: str) -> str:
    """Return the name of a row."""
    return f"{contender}, {TITLES[network]}"


def lineup(scale: Scale, resources: ExitStack) -> Lineup:
    entries = []
    for network in scale.networks:
        setup = Setup(
            4 * NUMBERS[network],
            model="1",
            optimizer="adam",
            pieces=scale.network_steps * (SMALL_STEPS_PER_STEP if network == "small" else 1),
            workers=2,
            batch=BATCH_SIZE,
            network=network,
        )
        entries += [
            job(name(ours(lane), network), replace(setup, lanes=lane), "script") for lane in LANES
        ]
        entries += [
            peer(name(DDP, network), "gloo", setup, "ddp"),
            peer(name(DDP_PLAIN, network), "gloo", setup, "ddp_plain"),
        ]
    return Lineup(entries)


WORK = Work(
    "training",
    "A step of a training script: a batch of 32 pictures from the loader, forward, backward, Adam. "
    "2 workers of one thread each, sync, 1 server, all on this machine; beside "
    "DistributedDataParallel over gloo with 2 ranks, Adam fused in each or as it is by default.",
    lineup,
)
