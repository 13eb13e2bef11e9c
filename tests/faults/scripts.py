"""What workers do while servers and workers around them die."""

import threading
import time
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn
from torch.nn import functional as F

import psworker

NOBODY: Mapping[int, float] = MappingProxyType({})


def network() -> nn.Sequential:
    """With all that has to survive: normalization's buffers, dropout's random numbers, Adam's moments."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.rand(80, 6, generator=generator), torch.randint(0, 3, (80,), generator=generator)


def train(
    address: str, rank: int | None, epochs: int = 3, pause: float = 0.0, slow: Mapping[int, float] = NOBODY
) -> None:
    """A classifier on 10 batches an epoch, with a learning rate that changes at every step. Says when it made each.

    pause: seconds that a step computes; slow: other ones, by rank.
    """
    torch.set_num_threads(1)
    computing = threading.Event()
    print(f"connects {time.monotonic():.3f}", flush=True)
    with psworker.connect(address, rank=rank, device="cpu", connect_timeout=60.0) as job:
        model = network()
        optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.05), model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
        job.resume(scheduler)
        for x, y in job.batches(data(), batch_size=8, epochs=epochs, seed=3):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            computing.wait(slow.get(rank or 0, pause))
            print(f"step {time.monotonic():.3f} {job.version}", flush=True)
