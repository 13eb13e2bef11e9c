"""Samplers as arguments of `job.batches`."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from pscommon.core.data_loop import LoopSpec
from pscommon.core.errors import InvalidRequestError
from psworker.core.results import PushResult
from psworker.data import order as orders
from psworker.data.order import order_of
from psworker.job import Job
from psworker.optim.optimizer import ServerOptimizer
from tests.support.loader_ledger import Count, Ledger
from tests.support.samplers import DISTRIBUTED, Buckets, Evens, train_pass

NUMBERS = torch.arange(10.0)


class WeightRecorder(Ledger):
    """Client that records the number of samples of each push."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[int] = []

    def exchange(self, **call: Any) -> PushResult:
        if call["gradients"] is not None:
            self.weights.append(call["samples"])
        return super().exchange(**call)


def started() -> tuple[Job, ServerOptimizer, WeightRecorder]:
    client = WeightRecorder()
    job, model = Job(client), nn.Linear(1, 1)
    return job, job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model), client


class RandomIndices(Sampler[int]):
    """Sampler without a length that uses all three random generators."""

    def __iter__(self) -> Iterator[int]:
        yield int(torch.randint(10, ()))
        yield int(np.random.randint(10))
        yield random.randrange(10)
        yield from torch.randperm(10).tolist()


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


# ---- order ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_contain_the_indices_of_a_sampler_in_order(workers: int) -> None:
    job, optimizer, client = started()
    loader = job.batches(NUMBERS, 2, sampler=Evens(), num_workers=workers)

    assert len(loader) == 3
    assert train_pass(loader, optimizer) == [[8, 0], [2, 4], [6]]
    assert len(loader) == 3
    assert client.weights == [2, 2, 1]
    (spec,) = client.loops
    assert isinstance(spec, LoopSpec)
    assert (spec.size, spec.sampler, spec.shuffle, spec.batches, len(spec.order)) == (
        5,
        "Evens",
        False,
        0,
        32,
    )


def test_drop_last_omits_the_incomplete_batch_of_a_sampler() -> None:
    job, optimizer, _ = started()
    loader = job.batches(NUMBERS, 2, sampler=Evens(), drop_last=True)

    assert len(loader) == 2
    assert train_pass(loader, optimizer) == [[8, 0], [2, 4]]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_a_batch_sampler_are_weighted_by_their_size(workers: int) -> None:
    job, optimizer, client = started()
    loader = job.batches(NUMBERS, batch_sampler=Buckets(), num_workers=workers)

    assert loader.batch_size is None
    assert len(loader) == 3
    assert train_pass(loader, optimizer) == [[0, 1, 2, 3], [4], [5, 6]]
    assert client.weights == [4, 1, 2]
    (spec,) = client.loops
    assert isinstance(spec, LoopSpec)
    assert (spec.size, spec.batch_size, spec.batches, spec.total) == (7, 4, 3, 3)


@pytest.mark.parametrize("given", [{"batch_size": 2, "sampler": []}, {"batch_sampler": []}])
def test_an_empty_sampler_yields_no_batches(given: dict[str, Any]) -> None:
    job, optimizer, _ = started()
    loader = job.batches(NUMBERS, **given)

    assert len(loader) == 0
    assert train_pass(loader, optimizer) == []


@pytest.mark.parametrize(
    "sampler",
    [
        [3, 1, 2],
        torch.tensor([3, 1, 2]),
        np.array([3, 1, 2]),
        SubsetRandomSampler([3, 1, 2]),
        WeightedRandomSampler([1.0] * 10, 7),
        RandomSampler(range(10), replacement=True, num_samples=30),
        RandomIndices(),
    ],
)
def test_a_sampler_does_not_depend_on_the_state_of_random_generators(sampler: Any) -> None:
    """Its order is a function of seed and pass, and it does not change the script's generators."""
    runs = []
    for noise in (0, 3):
        job, optimizer, _ = started()
        loader = job.batches(NUMBERS, 4, sampler=sampler, seed=5, reseed=False)
        torch.manual_seed(noise), np.random.seed(noise), random.seed(noise)
        before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        iterator = iter(loader)
        after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        assert torch.equal(before[0], after[0])
        assert before[1:] == after[1:]
        runs.append([train_pass(iterator, optimizer), train_pass(loader, optimizer)])

    assert runs[0] == runs[1]


def test_a_random_sampler_has_another_order_for_each_pass_and_seed() -> None:
    one, other, third = (
        order_of(RandomIndices(), 2, False, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))
    )

    assert len({tuple(order.indices.tolist()) for order in (one, other, third)}) == 3
    assert len({order.digest for order in (one, other, third)}) == 3


def test_the_digest_differs_between_orders_and_never_changes() -> None:
    """The digest is literal: another release on another machine may resume the job."""
    given: list[tuple[Any, int | None]] = [
        ([0, 1, 2, 3], 2),
        ([0, 1, 3, 2], 2),
        ([0, 1, 2, 3], 3),
        ([[0, 1], [2, 3]], None),
        ([[0], [1, 2, 3]], None),
    ]
    digests = [order_of(sampler, size, False, 0, 0).digest for sampler, size in given]

    assert digests[0] == digests[3]
    assert len(set(digests)) == 4
    assert digests[0] == "92ed0f5aa7330c92675d184e509ec413"


def test_a_sampler_without_a_length_has_one_during_a_pass() -> None:
    job, optimizer, _ = started()
    loader = job.batches(NUMBERS, 4, sampler=RandomIndices())

    with pytest.raises(TypeError, match=r"'RandomIndices' has no len\(\)"):
        len(loader)
    for _ in loader:
        assert len(loader) == 4
        optimizer.step()


# ---- misuse --------------------------------------------------------------------------------------


class FixedSampler(Sampler[int]):
    def __init__(self, given: Any) -> None:
        self.given = given

    def __iter__(self) -> Iterator[Any]:
        return iter(self.given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"batch_size": 2, "sampler": Evens(), "shuffle": True},
            "sampler excludes shuffle=True.*leave out shuffle",
        ),
        (
            {"batch_size": 2, "batch_sampler": Buckets()},
            "batch_sampler excludes batch_size:",
        ),
        (
            {"batch_sampler": Buckets(), "shuffle": True, "drop_last": True, "sampler": Evens()},
            "batch_sampler excludes shuffle=True, drop_last, sampler",
        ),
        (
            {"batch_size": 2, "sampler": DISTRIBUTED},
            "sampler=DistributedSampler",
        ),
        (
            {"batch_sampler": BatchSampler(DISTRIBUTED, 2, False)},
            "batch_sampler=DistributedSampler",
        ),
        ({"batch_size": 2, "sampler": 3}, "sampler=3 is not iterable"),
        (
            {"batch_size": 2, "sampler": iter([1])},
            r"^sampler is an iterator \(list_iterator\)",
        ),
        ({"batch_sampler": (x for x in [[1]])}, r"batch_sampler is an iterator \(generator\)"),
        (
            {"batch_size": 2, "sampler": Evens(), "epochs": 2},
            "sampler excludes epochs=2",
        ),
        ({"batch_sampler": Buckets(), "epochs": 0}, "batch_sampler excludes epochs=0"),
        ({"batch_size": 0, "sampler": Evens()}, "batch_size must be at least 1"),
    ],
)
def test_incompatible_arguments_are_refused_at_the_call(
    given: dict[str, Any], message: str
) -> None:
    job, _, _ = started()

    with pytest.raises(InvalidRequestError, match=message):
        job.batches(NUMBERS, **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"batch_size": 2, "sampler": FixedSampler(["a"])},
            "sampler FixedSampler failed to give indices: 'str'",
        ),
        (
            {"batch_size": 2, "sampler": FixedSampler([1.5])},
            "sampler FixedSampler failed to give indices: 'float'",
        ),
        (
            {"batch_size": 2, "sampler": FixedSampler([2**70])},
            "sampler FixedSampler failed to give indices: ",
        ),
        (
            {"batch_sampler": FixedSampler([1, 2])},
            "batch_sampler FixedSampler gave 1 instead",
        ),
        (
            {"batch_sampler": FixedSampler([[1], []])},
            "batch_sampler FixedSampler gave an empty batch",
        ),
        (
            {"batch_sampler": FixedSampler([[1], [None]])},
            "sampler FixedSampler failed to give indices: 'NoneType'",
        ),
    ],
)
def test_invalid_indices_of_a_sampler_are_refused_at_the_pass(
    given: dict[str, Any], message: str
) -> None:
    """The refused pass has not begun: the next one has its number."""
    job, optimizer, client = started()

    with pytest.raises(InvalidRequestError, match=message):
        iter(job.batches(NUMBERS, **given))
    train_pass(job.batches(NUMBERS, 5), optimizer)
    assert client.loops == [LoopSpec(0, 10, 5)]


@pytest.mark.parametrize(
    "given",
    [{"batch_size": 2, "sampler": Endless()}, {"batch_sampler": FixedSampler([[0] * 3] * 40)}],
)
def test_an_endless_sampler_is_refused(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "MAX_INDICES", 100)
    job, _, _ = started()

    with pytest.raises(InvalidRequestError, match="gave more than 100 indices"):
        iter(job.batches(NUMBERS, **given))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"batch_size": 2, "sampler": Evens()},
            "^sampler cannot apply to a stream",
        ),
        (
            {"batch_sampler": Buckets()},
            "^batch_sampler cannot apply to a stream",
        ),
        (
            {"batch_size": 2, "drop_last": True, "num_workers": 1},
            "drop_last, num_workers cannot apply",
        ),
        ({}, "batch_size is missing"),
    ],
)
def test_a_stream_with_a_sampler_is_refused(given: dict[str, Any], message: str) -> None:
    job, _, _ = started()

    with pytest.raises(InvalidRequestError, match=message):
        job.batches(Count(), **given)
