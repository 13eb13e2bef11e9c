"""A batch that the script of one worker leaves out has no part in any update, as in torch."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from psworker import Job
from tests.support.cluster import Cluster
from tests.support.policies import POLICIES
from tests.support.training_threads import real
from tests.support.workers import status

Make = Callable[..., Cluster]

SIZE = 4
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(32, 6, generator=GENERATOR)
Y = X.sum(1, keepdim=True)
BAD = 3
"""Number of the batch whose loss is NaN."""
Y[SIZE * BAD : SIZE * (BAD + 1)] = math.nan


def network() -> nn.Module:
    model = nn.Linear(6, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter))
    return model


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def plain(updates: Sequence[Sequence[int]]) -> Tensor:
    """Return the weights after updates with the mean gradient over these batches."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for numbers in updates:
        optimizer.zero_grad()
        rows = torch.cat([torch.arange(SIZE * n, SIZE * (n + 1)) for n in numbers])
        F.mse_loss(model(X[rows]), Y[rows]).backward()
        optimizer.step()
    return weights(model)


def skipping(job: Job, **options: Any) -> Tensor:
    model = network()
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)
    for x, y in job.batches((X, Y), SIZE, shuffle=False):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        if not torch.isfinite(loss):
            continue
        loss.backward()
        optimizer.step()
    job.wait()
    return weights(model)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_batch_that_one_rank_leaves_out_has_no_part(cluster: Make, overlap: bool) -> None:
    """Rank 1 has batches 1, 3, 5, 7; its second push is of batch 5."""
    address = cluster(2, min_workers=2).address

    results = real(address, 2, lambda job: skipping(job, overlap=overlap))

    for found in results:
        torch.testing.assert_close(found, plain([[0, 1], [2, 5], [4, 7], [6]]))
    (row,) = status(address)["data"]
    assert (row["committed"], row["total"]) == (8, 8)
    assert status(address)["samples"] == 7 * SIZE


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_one_worker_computes_what_torch_computes(cluster: Make, policy: dict[str, Any]) -> None:
    address = cluster(1, **policy).address

    (found,) = real(address, 1, skipping)

    torch.testing.assert_close(found, plain([[n] for n in range(8) if n != BAD]))


def test_a_round_weighs_the_batches_that_one_rank_has_accumulated(cluster: Make) -> None:
    """Each step of a worker is of two batches; one of the eight is left out."""
    address = cluster(2, min_workers=2).address

    def accumulating(job: Job) -> tuple[Tensor, list[list[int]]]:
        model, updates, numbers = network(), list[list[int]](), list[int]()
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        rows = torch.arange(len(X))
        for count, (x, y, row) in enumerate(job.batches((X, Y, rows), SIZE, shuffle=False)):
            loss = F.mse_loss(model(x), y)
            if torch.isfinite(loss):
                loss.backward()
                numbers.append(int(row[0]) // SIZE)
            if count % 2:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad /= len(numbers)
                optimizer.step()
                optimizer.zero_grad()
                updates, numbers = [*updates, numbers], []
        return weights(model), updates

    (found, first), (_, second) = real(address, 2, accumulating)

    rounds = [a + b for a, b in zip(first, second, strict=True)]
    assert sorted(map(len, rounds)) == [3, 4]
    torch.testing.assert_close(found, plain(rounds))
