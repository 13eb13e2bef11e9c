"""DataLoaders as arguments of `job.batches`."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from pscommon.core.data_loop import LoopSpec
from pscommon.core.errors import InvalidRequestError
from psworker.job import Job
from psworker.optim.optimizer import ServerOptimizer
from tests.support.loader_ledger import Count, Ledger
from tests.support.samplers import DISTRIBUTED, Buckets, Evens, train_pass

NUMBERS = torch.arange(10.0)


def started() -> tuple[Job, ServerOptimizer, Ledger]:
    client = Ledger()
    job, model = Job(client), nn.Linear(1, 1)
    return job, job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model), client


# ---- DataLoader ----------------------------------------------------------------------------------


def doubled(samples: list[Tensor]) -> Tensor:
    return 2 * torch.stack(samples)


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"batch_size": 4}, {"batch_size": 4, "shuffle": False}),
        ({}, {"batch_size": 1, "shuffle": False}),
        (
            {"batch_size": 4, "shuffle": True, "drop_last": True},
            {"batch_size": 4, "drop_last": True},
        ),
        ({"batch_size": 4, "shuffle": True, "num_workers": 2}, {"batch_size": 4}),
        ({"batch_size": 2, "sampler": Evens()}, {"batch_size": 2, "sampler": Evens()}),
        ({"batch_sampler": Buckets(), "num_workers": 1}, {"batch_sampler": Buckets()}),
        (
            {"batch_size": 4, "collate_fn": doubled},
            {"batch_size": 4, "shuffle": False, "collate_fn": doubled},
        ),
        (
            {"batch_size": 4, "sampler": RandomSampler(range(10), num_samples=6)},
            {"batch_size": 4, "sampler": RandomSampler(range(10), num_samples=6)},
        ),
    ],
)
def test_a_data_loader_yields_the_same_batches_as_its_options(
    options: dict[str, Any], same: dict[str, Any]
) -> None:
    job, optimizer, _ = started()
    other, other_optimizer, _ = started()
    given = DataLoader(NUMBERS, **options)  # type: ignore[arg-type]
    loader, expected = job.batches(given, seed=3), other.batches(NUMBERS, seed=3, **same)

    assert loader.dataset is NUMBERS
    assert len(loader) == len(expected) == len(given)
    assert loader.batch_size == expected.batch_size == given.batch_size
    for _ in range(2):
        assert train_pass(loader, optimizer) == train_pass(expected, other_optimizer)


def test_the_generator_of_a_data_loader_determines_the_orders() -> None:
    runs = []
    for _ in range(2):
        job, optimizer, _ = started()
        generator = torch.Generator().manual_seed(4)
        loader = job.batches(DataLoader(NUMBERS, 5, shuffle=True, generator=generator))  # type: ignore[arg-type]
        runs.append([train_pass(loader, optimizer) for _ in range(2)])

    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_epochs_and_seed_of_a_data_loader_are_arguments_of_the_call() -> None:
    job, optimizer, client = started()

    seen = train_pass(
        job.batches(DataLoader(NUMBERS, 5, shuffle=True), epochs=2, seed=9), optimizer
    )  # type: ignore[arg-type]

    assert len(seen) == 4
    assert client.loops == [LoopSpec(0, 10, 5, epochs=2, seed=9)]


def test_a_data_loader_over_a_stream_is_a_stream() -> None:
    job, optimizer, _ = started()

    assert train_pass(job.batches(DataLoader(Count(), batch_size=2)), optimizer) == [
        [0, 1],
        [2, 3],
        [4],
    ]


class OverriddenLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter(())


class NodeLoader(DataLoader[Any]):
    """Transforms the batches, as the NeighborLoader of PyG does."""

    def _get_iterator(self) -> Any:
        return map(doubled, super()._get_iterator())


class ReversedLoader(DataLoader[Any]):
    @property
    def _index_sampler(self) -> Any:
        return [[1, 0]]


class PlainLoader(DataLoader[Any]):
    """Changes only what job.batches reads."""

    def __init__(self, dataset: Any, **options: Any) -> None:
        super().__init__(dataset, collate_fn=doubled, **options)


def patched() -> DataLoader[Any]:
    loader = DataLoader(NUMBERS, 2)  # type: ignore[arg-type]
    loader._get_iterator = lambda: iter(())  # type: ignore[method-assign,assignment,return-value]
    return loader


def test_a_subclass_that_only_sets_options_is_read() -> None:
    job, optimizer, _ = started()
    loader = PlainLoader(NUMBERS, batch_size=5)

    assert train_pass(job.batches(loader), optimizer) == [batch.tolist() for batch in loader]


@pytest.mark.parametrize(
    ("loader", "call", "message"),
    [
        (
            DataLoader(NUMBERS, 2),
            {"batch_size": 2},
            "the DataLoader excludes batch_size:",
        ),  # type: ignore[arg-type]
        (
            DataLoader(NUMBERS, 2),  # type: ignore[arg-type]
            {"shuffle": False, "num_workers": 2, "sampler": Evens()},
            "the DataLoader excludes shuffle, sampler, num_workers:",
        ),
        (OverriddenLoader(NUMBERS, 2), {}, "OverriddenLoader.*__iter__"),
        (NodeLoader(NUMBERS, 2), {}, "NodeLoader.*_get_iterator"),
        (ReversedLoader(NUMBERS, 2), {}, "ReversedLoader.*_index_sampler"),
        (patched(), {}, "DataLoader.*_get_iterator"),
        (DataLoader(NUMBERS, batch_size=None), {}, "batch_size=None"),  # type: ignore[arg-type]
        (
            DataLoader(Count(), 2, num_workers=1),
            {},
            "num_workers, prefetch_factor cannot apply",
        ),
        (DataLoader(Count(), 2, drop_last=True), {}, "drop_last cannot apply"),
        (
            DataLoader(NUMBERS, 2, sampler=DISTRIBUTED),
            {},
            "sampler=DistributedSampler",
        ),  # type: ignore[arg-type]
        (DataLoader(NUMBERS, 2, sampler=Evens()), {"epochs": 2}, "sampler excludes epochs=2"),  # type: ignore[arg-type]
    ],
)
def test_unsupported_data_loaders_are_refused(
    loader: Any, call: dict[str, Any], message: str
) -> None:
    job, _, _ = started()

    with pytest.raises(InvalidRequestError, match=message):
        job.batches(loader, **call)
