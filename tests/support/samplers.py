"""Samplers of a data set of ten numbers, and a pass over a loader."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler

from psworker.optim.optimizer import ServerOptimizer


class Evens(Sampler[int]):
    """Sampler of the even indices, the last one first."""

    def __iter__(self) -> Iterator[int]:
        return iter([8, 0, 2, 4, 6])

    def __len__(self) -> int:
        return 5


class Buckets(Sampler[list[int]]):
    """Batch sampler with batches of several sizes."""

    def __iter__(self) -> Iterator[list[int]]:
        yield [0, 1, 2, 3]
        yield [4]
        yield [5, 6]

    def __len__(self) -> int:
        return 3


DISTRIBUTED = DistributedSampler(range(10), num_replicas=2, rank=0)  # type: ignore[arg-type]


def train_pass(loader: Any, optimizer: ServerOptimizer) -> list[list[float]]:
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        optimizer.step()
    return seen
