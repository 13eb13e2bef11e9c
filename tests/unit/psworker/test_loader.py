"""Loaders of a script: one pass for each `iter()`; length, data set and batch size."""

import gc
import multiprocessing
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pscommon.core.errors import InvalidRequestError
from pscommon.core.log_entries import BatchKey
from pscommon.core.script_place import PassName
from psworker.job import Job
from psworker.optim.optimizer import ServerOptimizer
from tests.support.loader_ledger import Count, Ledger

NUMBERS = torch.arange(10.0)


def started() -> tuple[Job, ServerOptimizer, Ledger]:
    client = Ledger()
    job, model = Job(client), nn.Linear(1, 1)
    return job, job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model), client


def train_passes(loader: Any, optimizer: ServerOptimizer, count: int) -> list[list[list[float]]]:
    """Train for `count` passes; return the batches of each."""
    seen = []
    for _ in range(count):
        seen.append([])
        for batch in loader:
            seen[-1].append(batch.tolist())
            optimizer.step()
    return seen


def test_passes_have_the_orders_of_the_epochs_of_one_loop() -> None:
    job, optimizer, client = started()
    complete, other_optimizer, _ = started()

    seen = train_passes(job.batches(NUMBERS, 4, seed=3), optimizer, 3)
    at_once = train_passes(complete.batches(NUMBERS, 4, epochs=3, seed=3), other_optimizer, 1)

    assert [batch for each in seen for batch in each] == at_once[0]
    assert [spec.loop for spec in client.loops] == [0, 1, 2]
    assert [spec.first_epoch for spec in client.loops] == [0, 1, 2]
    assert client.pushed == [(BatchKey(loop, number),) for loop in range(3) for number in range(3)]


def test_each_pass_over_a_loader_with_epochs_has_all_epochs() -> None:
    job, optimizer, client = started()
    loader = job.batches(NUMBERS, 5, epochs=2)

    seen = train_passes(loader, optimizer, 2)

    assert [len(each) for each in seen] == [4, 4]
    assert [spec.first_epoch for spec in client.loops] == [0, 2]
    assert len(loader) == 4


def test_alternating_loaders_count_their_epochs_separately() -> None:
    """A second loader over a data set of the same size does not change the orders of the first
    one.
    """
    job, optimizer, _ = started()
    alone, other_optimizer, _ = started()
    one, other = job.batches(NUMBERS, 4), job.batches(-NUMBERS, 4)
    expected = train_passes(alone.batches(NUMBERS, 4), other_optimizer, 3)

    seen = []
    for _ in range(3):
        seen += train_passes(one, optimizer, 1)
        assert sorted(x for batch in train_passes(other, optimizer, 1)[0] for x in batch) == sorted(
            (-NUMBERS).tolist()
        )

    assert seen == expected


def test_passes_are_numbered_in_the_order_of_iter_calls() -> None:
    job, optimizer, client = started()
    train, test = job.batches(NUMBERS, 5), job.batches(NUMBERS[:4], 2)

    with torch.no_grad():
        list(test)
    train_passes(train, optimizer, 1)

    assert [(spec.loop, spec.batch_size) for spec in client.loops] == [(0, 2), (1, 5)]


def test_an_epoch_loop_with_an_evaluation_after_each_epoch() -> None:
    """The loop of pytorch/examples alternates two loaders and reads their lengths and data sets."""
    job, optimizer, _ = started()
    train_loader = job.batches((NUMBERS, -NUMBERS), batch_size=4)
    test_loader = job.batches((NUMBERS[:6], -NUMBERS[:6]), batch_size=3, shuffle=False)
    for _ in range(2):
        seen = 0
        for number, (data, target) in enumerate(train_loader):
            assert torch.equal(data, -target)
            optimizer.step()
            optimizer.zero_grad()
            seen += len(data)
            assert number < len(train_loader) == 3
        assert seen == len(train_loader.dataset) == 10
        with torch.no_grad():
            assert sum(len(data) for data, _ in test_loader) == len(test_loader.dataset) == 6
        assert len(test_loader) == 2


def test_a_loader_has_its_data_set_and_batch_size_as_attributes() -> None:
    job, _, _ = started()
    data = TensorDataset(NUMBERS)

    assert job.batches(data, 4).dataset is data
    assert job.batches(data, 4).batch_size == 4
    assert [row.item() for (row,) in job.batches((NUMBERS,), 4).dataset] == NUMBERS.tolist()
    assert isinstance(job.batches(Count(), 2).dataset, Count)


@pytest.mark.parametrize(("drop_last", "expected"), [(False, 3), (True, 2)])
def test_the_length_is_the_number_of_batches(drop_last: bool, expected: int) -> None:
    job, optimizer, _ = started()
    loader = job.batches(NUMBERS, 4, drop_last=drop_last)

    assert len(loader) == expected
    assert len(train_passes(loader, optimizer, 1)[0]) == expected


def test_a_stream_has_no_length_and_each_pass_reads_it_again() -> None:
    job, optimizer, client = started()
    loader = job.batches(Count(), 2)

    with pytest.raises(TypeError, match=r"a stream has no len\(\)"):
        len(loader)
    assert train_passes(loader, optimizer, 2) == [[[0, 1], [2, 3], [4]]] * 2
    assert [spec.loop for spec in client.loops] == [0, 1]


@pytest.mark.parametrize("workers", [0, 2])
def test_leaving_a_pass_returns_batches_and_the_next_pass_is_complete(workers: int) -> None:
    job, optimizer, client = started()
    loader = job.batches(NUMBERS, 2, num_workers=workers)
    for _ in loader:
        optimizer.step()
        break

    assert client.returned == [BatchKey(0, number) for number in range(1, 1 + 2 * workers)]
    assert len(train_passes(loader, optimizer, 1)[0]) == 5


def test_a_new_pass_ends_an_open_one() -> None:
    job, optimizer, client = started()
    loader = job.batches(NUMBERS, 2, num_workers=1)
    iterator = iter(loader)
    next(iterator)

    assert len(train_passes(loader, optimizer, 1)[0]) == 5

    assert client.returned == [BatchKey(0, 1), BatchKey(0, 2)]
    with pytest.raises(InvalidRequestError, match="cannot continue this pass"):
        next(iterator)


def test_a_finished_iterator_stays_exhausted() -> None:
    job, optimizer, _ = started()
    loader = job.batches(NUMBERS, 5)
    first = iter(loader)
    for _ in first:
        optimizer.step()
    list(loader)

    assert next(first, None) is None


def test_persistent_processes_end_with_the_loader() -> None:
    """A DataLoader in a reference cycle waits 5 s for each of its processes."""
    job, optimizer, _ = started()
    loader = job.batches(NUMBERS, 5, num_workers=1, persistent_workers=True)
    train_passes(loader, optimizer, 1)
    for _ in loader:
        break
    (process,) = multiprocessing.active_children()

    gc.disable()
    try:
        del loader
    finally:
        gc.enable()

    assert not process.is_alive()


@pytest.mark.parametrize("persistent", [False, True])
def test_loader_processes_serve_several_passes(persistent: bool) -> None:
    job, optimizer, _ = started()
    alone, other_optimizer, _ = started()
    loader = job.batches(NUMBERS, 3, num_workers=2, persistent_workers=persistent)

    first = next(iter(loader))  # the rest of that pass is not read
    seen = train_passes(loader, optimizer, 2)

    expected = train_passes(alone.batches(NUMBERS, 3), other_optimizer, 3)
    assert [first.tolist(), *seen] == [expected[0][0], *expected[1:]]


@pytest.mark.full
def test_without_reseeding_loader_processes_get_a_new_seed_in_each_pass() -> None:
    job, optimizer, _ = started()
    loader = job.batches(Noise(), 5, shuffle=False, reseed=False, num_workers=1)

    one, other = train_passes(loader, optimizer, 2)

    assert one != other


class Noise(TensorDataset):
    """Dataset whose samples are random numbers."""

    def __init__(self) -> None:
        super().__init__(NUMBERS)

    def __getitem__(self, index: Any) -> Tensor:
        return torch.rand(())


def test_a_missing_batch_size_is_refused() -> None:
    job, _, _ = started()

    with pytest.raises(
        InvalidRequestError,
        match="batch_size is missing",
    ):
        job.batches(NUMBERS)


def test_passes_without_servers_are_never_skipped() -> None:
    job, optimizer, _ = started()
    loader = job.batches(NUMBERS[:0], 2)

    assert not loader.skipped
    assert train_passes(loader, optimizer, 1) == [[]]
    assert not loader.skipped


def test_unused_iterators_delay_nothing() -> None:
    """Some frameworks call iter() without reading the pass, and store the iterator for a while."""
    job, optimizer, client = started()
    loader, other = job.batches(NUMBERS, 5), job.batches(NUMBERS[:4], 4)
    iterator, second = iter(loader), iter(loader)
    iter(other)

    first_open = []
    for _ in loader:
        first_open.append(dict(job.session.loops.place().first_open))
        optimizer.step()

    assert [spec.loop for spec in client.loops] == [3]
    assert first_open == [{"0": 2, "1": 1}] * 2
    for replaced in (iterator, second):
        with pytest.raises(InvalidRequestError, match="cannot continue this pass"):
            next(replaced)


def test_an_earlier_iterator_may_begin_inside_a_later_pass() -> None:
    job, optimizer, client = started()
    iterator = iter(job.batches(NUMBERS, 5))

    for _ in job.batches(NUMBERS, 10):
        assert not job.session.loops.place().has_left(PassName("0", 0))
        assert len(next(iterator)) == 5
        optimizer.step()

    assert client.pushed == [(BatchKey(1, 0), BatchKey(0, 0))]


def test_an_evaluation_pass_reports_its_batches_as_completed() -> None:
    """Otherwise another worker would get them when this one leaves."""
    job, optimizer, client = started()
    train, test = job.batches(NUMBERS, 5), job.batches(NUMBERS[:4], 2)
    with torch.no_grad():
        list(test)
    assert client.dropped == [BatchKey(0, 0), BatchKey(0, 1)]

    train_passes(train, optimizer, 1)
    assert client.pushed == [(BatchKey(1, 0),), (BatchKey(1, 1),)]
    with torch.no_grad():
        for _ in test:
            break
    assert client.dropped == [BatchKey(0, 0), BatchKey(0, 1)]


def test_an_evaluation_within_an_accumulation_does_not_change_the_push() -> None:
    job, optimizer, client = started()
    for number, _ in enumerate(job.batches(NUMBERS, 5)):
        with torch.no_grad():
            list(job.batches(NUMBERS[:4], 4))
        if number:
            optimizer.step()

    assert client.dropped == [BatchKey(1, 0), BatchKey(2, 0)]
    assert client.pushed == [(BatchKey(0, 0), BatchKey(0, 1))]
