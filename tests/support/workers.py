"""Worker threads of the test's process against real servers, with small comparable trainings."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from pscommon.snapshot import weights_sha256
from psserver.core.commands.recorder import MIN_PAUSE_SECONDS
from psworker import Client, Job, OptimizerSpec

T = TypeVar("T")

DEADLINE = 30.0
POLL = 0.01

OUTLIVED = 4 * MIN_PAUSE_SECONDS
"""A lease that heartbeats renew despite short pauses; servers know their longer pauses."""

VERSIONS = 15
"""Updates of a complete `training` with two workers: 3 epochs of 10 batches."""


def connected(address: str, rank: int | None = None, **options: Any) -> Client:
    """Return a Client with the timeouts of tests."""
    return Client(
        address, rank=rank, **{"connect_timeout": 10.0, "wait_timeout": DEADLINE, **options}
    )


def joined(address: str, rank: int = 0) -> Job:
    """Return the job of one of several workers in this process; psworker.connect allows one."""
    return Job(connected(address, rank), rank, torch.device("cpu"))


def together(*parts: Callable[[], T]) -> list[T]:
    """Run functions concurrently in threads; return their results in order or raise the first
    error.
    """
    with ThreadPoolExecutor(len(parts)) as pool:
        return [future.result(2 * DEADLINE) for future in [pool.submit(part) for part in parts]]


def until(condition: Callable[[], T], what: str, seconds: float = DEADLINE) -> T:
    """Return the condition's value as soon as it is true."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not (value := condition()):
        assert time.monotonic() < deadline, f"after {seconds:.0f} s: not {what}"
        pause.wait(POLL)
    return value


# ---- counting: each push subtracts 1 from every weight, so weights show how many have counted ----

ONES = {"a": np.ones((3, 40), np.float32), "b": np.ones(100, np.float32)}


def counter(address: str, rank: int | None = None, **options: Any) -> Client:
    """Return a client whose model starts at zero and subtracts pushes: SGD with learning rate 1."""
    client = connected(address, rank, **options)
    client.register(
        {name: np.zeros_like(one) for name, one in ONES.items()}, OptimizerSpec("sgd", lr=1.0)
    )
    return client


def count(client: Client, steps: int = 1) -> None:
    """Push ones `steps` times."""
    for _ in range(steps):
        assert client.push(ONES).status == "applied"


def counted(weights: dict[str, Any]) -> int:
    """Return the number of counted pushes; AssertionError if two weights differ."""
    values = {
        float(-number) for array in weights.values() for number in np.unique(np.asarray(array))
    }
    assert len(values) == 1, f"the weights are of several versions: {sorted(values)}"
    return int(values.pop())


# ---- a training with all state that must survive a restart, except dropout (a shared generator)
# ----


def network() -> nn.Sequential:
    """Return a model with fixed initial weights, independent of other threads."""
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
    return model


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(
        torch.rand(80, 6, generator=generator), torch.randint(0, 3, (80,), generator=generator)
    )


def training(
    address: str,
    rank: int,
    stop_at: int = VERSIONS,
    each: Callable[[Job], object] = lambda job: None,
) -> int:
    """Run one worker's script up to version `stop_at`; return the version.

    Adam with a learning rate that changes at each step. each: called after each step.
    """
    with joined(address, rank) as job:
        model = network()
        optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.05), model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        job.resume(scheduler)
        for x, y in job.batches(data(), batch_size=8, epochs=3, seed=3, reseed=False):
            if job.version == stop_at:
                break
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            each(job)
        return job.version


def train(address: str, workers: int = 2, **options: Any) -> list[int]:
    """Run `training` on several concurrent workers."""
    return together(
        *[lambda rank=rank: training(address, rank, **options) for rank in range(workers)]
    )


def weights_of(address: str) -> dict[str, Any]:
    """Return the job's weights and buffers as an observer gets them."""
    with connected(address, observe=True) as client:
        return client.pull()


def digest(address: str) -> str:
    """Return the digest of ps-run's summary."""
    return weights_sha256(weights_of(address))


def status(address: str) -> dict[str, Any]:
    with connected(address, observe=True) as client:
        return client.status()


def snapshots(address: str) -> Sequence[int]:
    """Return the versions that are complete on disk."""
    return [row["version"] for row in status(address)["snapshots"]]
