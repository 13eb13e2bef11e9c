"""With --global-batch the learning curve is that of one worker, for any number of workers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from psworker import InvalidRequestError, Job
from tests.support.cluster import Cluster
from tests.support.training_threads import real, simulated
from tests.support.workers import status

Make = Callable[..., Cluster]

SIZE, UNIT, GLOBAL, EPOCHS = 22, 2, 8, 3
DATA = torch.linspace(-1.0, 1.0, SIZE)[:, None]
PREFETCHING = {"num_workers": 1, "multiprocessing_context": "forkserver"}
"""A plain fork of this process could copy a lock of torch that another worker's thread holds."""
UPDATES = 3 * EPOCHS
"""An epoch is 11 batches: updates of 4, 4 and 3."""


def network() -> nn.Module:
    """Return a model initialised without the global generator, which worker threads share."""
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    for parameter in model.parameters():
        parameter.data = torch.linspace(-1.0, 1.0, parameter.numel()).view_as(parameter)
    return model


def train(job: Job, **options: object) -> tuple[Tensor, int]:
    """Return the final weights, and how many steps this worker made."""
    model, steps = network(), 0
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
    for batch in job.batches(DATA, UNIT, EPOCHS, seed=3, **options):
        steps += 1
        ((model(batch) - batch**2) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), steps


def plain() -> Tensor:
    """Train as one worker whose batches are the updates: 8, 8 and 6 samples an epoch."""

    def script(job: Job) -> Tensor:
        model = network()
        optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
        for batch in job.batches(DATA, GLOBAL, EPOCHS, seed=3):
            ((model(batch) - batch**2) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    (weights,) = simulated(1, script)
    return weights


@pytest.mark.every(2)
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_training_is_the_same_for_any_number_of_workers(cluster: Make, workers: int) -> None:
    """5 workers share 4 batches: one of them has no share in each update."""
    address = cluster(2, min_workers=workers, global_batch=GLOBAL).address

    results = real(address, workers, train)

    (row,) = status(address)["data"]
    assert status(address)["version"] == UPDATES
    assert (row["committed"], row["total"], row["duplicates"]) == (11 * EPOCHS, 11 * EPOCHS, 0)
    assert sum(steps for _, steps in results) == 11 * EPOCHS
    for weights, _ in results:
        torch.testing.assert_close(weights, plain(), rtol=1e-5, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("workers", [2, 3])
def test_two_runs_give_the_same_bits(cluster: Make, workers: int) -> None:
    """Over gRPC and simulated, with and without prefetching loaders."""
    settings = {"min_workers": workers, "global_batch": GLOBAL}
    runs = [
        simulated(workers, train, **settings),
        real(cluster(1, **settings).address, workers, train),
    ]
    address = cluster(2, **settings).address
    runs.append(real(address, workers, lambda job: train(job, **PREFETCHING)))

    assert all(torch.equal(weights, runs[0][0][0]) for run in runs for weights, _ in run)


def test_a_batch_size_that_does_not_fit_is_refused(cluster: Make) -> None:
    address = cluster(1, global_batch=5).address

    with pytest.raises(InvalidRequestError, match=r"--global-batch 5 .*batch_size 2"):
        real(address, 1, train)
