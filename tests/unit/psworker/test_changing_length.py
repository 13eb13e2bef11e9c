"""A data set whose length changes between passes, compared with torch's DataLoader."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from psworker.job import Job
from psworker.optim.optimizer import ServerOptimizer
from tests.support.loader_ledger import Ledger
from tests.support.samplers import train_pass

LENGTHS = [8, 16, 24, 6, 9]


class Replay(Dataset[Any]):
    """A replay buffer."""

    def __init__(self, size: int) -> None:
        self.items = list(range(size))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> float:
        return float(self.items[index])


def started() -> tuple[Job, ServerOptimizer, Ledger]:
    client = Ledger()
    job, model = Job(client), nn.Linear(1, 1)
    return job, job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model), client


def samples(batches: list[list[float]]) -> list[float]:
    return sorted(sample for batch in batches for sample in batch)


OPTIONS = [
    lambda data: {"batch_size": 4, "shuffle": True},
    lambda data: {"batch_size": 4, "shuffle": False},
    lambda data: {"batch_size": 4, "shuffle": True, "drop_last": True},
    lambda data: {"batch_size": 4, "sampler": SequentialSampler(data)},
    lambda data: {"batch_size": 4, "sampler": SequentialSampler(range(6))},
    lambda data: {"batch_size": 4, "sampler": RandomSampler(range(6))},
    lambda data: {"batch_size": 4, "sampler": WeightedRandomSampler([1.0] + [0.0] * 5, 3)},
    lambda data: {"batch_sampler": BatchSampler(SequentialSampler(data), 3, False)},
]
CASES = [(is_data_loader, 0, options) for is_data_loader in (False, True) for options in OPTIONS]
CASES += [(True, 2, OPTIONS[0])]


@pytest.mark.parametrize(
    ("is_data_loader", "processes", "options"),
    [*CASES, *(pytest.param(True, 2, each, marks=pytest.mark.full) for each in OPTIONS[1:])],
)
def test_each_pass_has_the_samples_and_the_length_of_torch(
    options: Any, processes: int, is_data_loader: bool
) -> None:
    data = Replay(LENGTHS[0])
    torchs: Any = DataLoader(data, **options(data))
    job, optimizer, _ = started()
    loader = job.batches(
        DataLoader(data, num_workers=processes, **options(data)) if is_data_loader else data,
        **({} if is_data_loader else options(data)),
    )
    for length in LENGTHS:
        data.items = list(range(max(length, 6) if "sampler" in options(data) else length))

        assert len(loader) == len(torchs)
        expected = [batch.tolist() for batch in torchs]
        seen = train_pass(loader, optimizer)
        assert len(seen) == len(expected) == len(loader)
        assert len(samples(seen)) == len(samples(expected))
        if "drop_last" not in options(data):
            assert samples(seen) == samples(expected)


def test_a_random_sampler_of_a_fixed_number_keeps_it() -> None:
    data = Replay(8)
    job, optimizer, _ = started()
    loader = job.batches(DataLoader(data, 4, sampler=RandomSampler(data, num_samples=8)))
    train_pass(loader, optimizer)
    data.items = list(range(64))

    assert len(samples(train_pass(loader, optimizer))) == 8
    assert max(samples(train_pass(loader, optimizer))) > 7


def test_a_growing_loader_counts_its_own_epochs() -> None:
    """Each order is that of an unchanged data set of this length in this epoch."""
    job, optimizer, client = started()
    data = Replay(8)
    loader = job.batches(data, 4, seed=3)
    seen = []
    for length in (8, 12, 12, 8):
        data.items = list(range(length))
        seen.append(train_pass(loader, optimizer))

    assert [(spec.size, spec.first_epoch) for spec in client.loops] == [  # type: ignore[union-attr]
        (8, 0),
        (12, 1),
        (12, 2),
        (8, 3),
    ]
    for length, numbers in ((12, (1, 2)), (8, (0, 3))):
        other, other_optimizer, _ = started()
        fixed = other.batches(Replay(length), 4, seed=3)
        orders = [train_pass(fixed, other_optimizer) for _ in range(4)]
        assert [seen[number] for number in numbers] == [orders[number] for number in numbers]


def test_a_data_set_that_grows_within_a_pass_does_not_change_the_pass() -> None:
    job, optimizer, _ = started()
    data = Replay(8)
    loader = job.batches(data, 4)
    count = 0
    for _ in loader:
        data.items.append(len(data.items))
        optimizer.step()
        count += 1

    assert count == 2
    assert len(loader) == 3
    assert len(train_pass(loader, optimizer)) == 3
