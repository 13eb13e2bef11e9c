"""A training whose weights count the consumed batches."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pscommon.core.data_loop import LoopSpec
from psworker import Job
from psworker.optim.optimizer import ServerOptimizer
from tests.support.workers import status

Batch = tuple[int, ...]
SIZE, BATCH, EPOCHS = 18, 4, 5
LOOP = LoopSpec(0, SIZE, BATCH, EPOCHS, seed=7)
ALL = [tuple(LOOP.indices(number).tolist()) for number in range(LOOP.total)]
"""5 batches per epoch, 25 in all: 2 or 3 workers get unequal shares; each epoch ends with a
small batch.
"""


def started(job: Job) -> tuple[nn.Module, ServerOptimizer]:
    model = nn.Linear(1, 1)
    return model, job.optimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model)


def batches(job: Job, epochs: int = EPOCHS, seed: int = 7, **options: Any) -> Iterator[Tensor]:
    return iter(job.batches(torch.arange(SIZE), BATCH, epochs, seed=seed, reseed=False, **options))


def compute(model: nn.Module, batch: Tensor) -> Batch:
    """Compute a gradient; return the indices in the batch."""
    model(batch[:, None].float()).mean().backward()
    return tuple(batch.tolist())


def train(
    job: Job, each: Callable[[int], object] = lambda step: None, into: list[Batch] | None = None
) -> list[Batch]:
    """Train a loop and call `each` before every step; return the used batches, added to `into`."""
    model, optimizer = started(job)
    used = [] if into is None else into
    for step, batch in enumerate(batches(job)):
        used.append(compute(model, batch))
        each(step)
        optimizer.step()
        optimizer.zero_grad()
    return used


def assert_each_once(shares: list[list[Batch]], address: str = "") -> None:
    """Check that each batch of each epoch was used by one worker and counted by the servers."""
    assert sorted(batch for share in shares for batch in share) == sorted(ALL)
    if address:
        (row,) = status(address)["data"]
        assert (row["committed"], row["leased"], row["dropped"], row["ended"]) == (
            len(ALL),
            0,
            0,
            True,
        )
        assert status(address)["samples"] == EPOCHS * SIZE
