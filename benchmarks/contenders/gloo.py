"""Contender: gloo between the setup's workers, what a DDP user has. Args: KIND SETUP [STORE RANK].

KIND "reduce": all_reduce of as many bytes. "adam": then the mean, and torch's fused Adam, in
each process. "ddp": DistributedDataParallel trains the setup's network, with the same Adam.
"ddp_plain": with Adam as torch has it without `fused`.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.contenders.exchange import check_weights
from benchmarks.networks import dataset, differentiate, network
from benchmarks.setup import Setup
from benchmarks.speaker import Command, Measurements, Speaker, Team, serve

WARM_UP_COUNT = 3

Work = tuple[Callable[[], None], Callable[[int], None]]
"""Function for one piece of work, and function that checks the number of pieces."""


def reduce(setup: Setup) -> Work:
    """The numbers are 0, after a first sum that is checked: in place, any other would grow from
    round to round.
    """
    tensor = torch.ones(setup.nbytes // 4)
    dist.all_reduce(tensor)
    if tensor.min() != setup.workers or tensor.max() != setup.workers:
        raise RuntimeError("gloo's sum is wrong")
    tensor.zero_()
    return lambda: dist.all_reduce(tensor), lambda updates: None


def adam(setup: Setup) -> Work:
    """One flat parameter whose gradients are 1: the mean of all workers' leaves them at 1."""
    parameter = torch.nn.Parameter(torch.zeros(setup.nbytes // 4))
    gradient = parameter.grad = torch.ones(setup.nbytes // 4)
    optimizer = torch.optim.Adam([parameter], lr=setup.rate, fused=True)

    def work() -> None:
        dist.all_reduce(gradient)
        gradient.div_(setup.workers)
        optimizer.step()

    return work, lambda updates: check_weights(parameter.detach()[[0, -1]].numpy(), setup, updates)


def ddp(setup: Setup, fused: bool = True) -> Work:
    """An ordinary script. The ranks must have the same weights after each turn."""
    model = DistributedDataParallel(network(setup.network), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=setup.rate, fused=fused)
    data = dataset()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, setup.batch, sampler=sampler)

    def endless() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for epoch in count():
            sampler.set_epoch(epoch)
            yield from loader

    batches = endless()

    def work() -> None:
        differentiate(model, next(batches))
        optimizer.step()
        optimizer.zero_grad()

    def check(updates: int) -> None:
        mine = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        first = mine.clone()
        dist.broadcast(first, 0)
        if not torch.equal(mine, first):
            raise RuntimeError(f"after {updates} updates the ranks have different weights")

    return work, check


def member(kind: str, setup: Setup, store: str, rank: int) -> None:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // setup.workers))
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=setup.workers
    )
    kinds = {"reduce": reduce, "adam": adam, "ddp": ddp, "ddp_plain": partial(ddp, fused=False)}
    work, check = kinds[kind](setup)
    updates = 0

    def turn() -> Measurements:
        nonlocal updates
        began = time.perf_counter()
        for _ in range(setup.pieces):
            work()
        seconds = (time.perf_counter() - began) / setup.pieces
        updates += setup.pieces
        check(updates)
        return {"seconds": seconds, "count": setup.pieces}

    serve({"go": turn}, WARM_UP_COUNT)
    dist.destroy_process_group()


def main(kind: str, setup: Setup) -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        args = (kind, setup.to_json(), str(Path(folder) / "store"))
        commands = [
            Command("benchmarks.contenders.gloo", (*args, str(rank)))
            for rank in range(setup.workers)
        ]
        team = Team([stack.enter_context(Speaker(command)) for command in commands])
        serve({"go": team.go})


if __name__ == "__main__":
    if len(sys.argv) > 3:
        member(sys.argv[1], Setup.from_json(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        main(sys.argv[1], Setup.from_json(sys.argv[2]))
