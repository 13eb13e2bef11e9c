"""Streams of a script: order, position of a resumed job, and the end of each source."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import psworker
from pscommon.core.data_stream import StreamSpec
from pscommon.core.errors import InvalidRequestError
from pscommon.core.log_entries import BatchKey
from psworker.client.local_client import LocalClient
from psworker.core.results import PushResult
from psworker.data.stream_dataset import StreamReader
from psworker.job import Job
from psworker.optim.optimizer import ServerOptimizer


class Recorder(LocalClient):
    """Client of a job with one worker that records pushed batches."""

    def __init__(self) -> None:
        super().__init__()
        self.pushed: list[tuple[BatchKey, ...]] = []

    def exchange(self, **call: Any) -> PushResult:
        if call["gradients"] is not None:
            self.pushed.append(tuple(call["batches"]))
        return super().exchange(**call)


def started() -> tuple[Job, ServerOptimizer, Recorder]:
    client = Recorder()
    job, model = Job(client), nn.Linear(1, 1)
    return job, job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model), client


class Count(IterableDataset[Any]):
    """Stream of the numbers below `size`."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        return map(torch.tensor, range(self.size))


class Sources:
    """Source s has the numbers from 10 s on. opened: source and offset of each read."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes
        self.opened: list[tuple[int, int]] = []

    def read(self, source: int, offset: int) -> Iterator[int]:
        self.opened.append((source, offset))
        return iter(range(10 * source + offset, 10 * source + self.sizes[source]))


@pytest.mark.parametrize("size", range(9))
def test_an_iterable_dataset_is_read_in_order_epoch_after_epoch(size: int) -> None:
    job, optimizer, _ = started()
    seen = []
    for batch in job.batches(Count(size), 3, epochs=2):
        seen.append(batch.tolist())
        optimizer.step()

    assert seen == [list(range(n, min(n + 3, size))) for n in range(0, size, 3)] * 2


def test_each_source_is_read_to_its_end_and_opened_once() -> None:
    job, optimizer, _ = started()
    data = Sources(4, 0, 2)
    seen = []
    for batch in job.batches(data, 2, sources=3, collate_fn=list):
        seen.append(batch)
        optimizer.step()

    assert seen == [[0, 1], [2, 3], [20, 21]]
    assert [where for where in data.opened if where[1] == 0] == [(0, 0), (1, 0), (2, 0)]


def test_a_push_has_the_number_of_samples_and_the_end_of_the_source() -> None:
    job, optimizer, client = started()
    for _ in job.batches(Sources(4, 3), 2, sources=2):
        optimizer.step()

    spec = StreamSpec(0, sources=2, batch_size=2)
    assert client.pushed == [
        (BatchKey(0, spec.number(0, 0), 2, False),),
        (BatchKey(0, spec.number(0, 1), 2, True),),
        (BatchKey(0, spec.number(1, 0), 2, False),),
        (BatchKey(0, spec.number(1, 1), 1, True),),
    ]


def test_a_reader_continues_at_the_position_of_the_ledger() -> None:
    """In a source begun by another worker, at a returned batch, and behind the end."""
    spec, data = StreamSpec(0, sources=2, batch_size=3), Sources(10, 7)
    stream = StreamReader(data, list, seed=None)
    read = {
        where: stream.read(spec, spec.number(*where))
        for where in [(1, 1), (1, 2), (0, 2), (0, 1), (1, 5)]
    }

    assert [samples for _, samples in read.values()] == [
        [13, 14, 15],
        [16],
        [6, 7, 8],
        [3, 4, 5],
        [],
    ]
    assert [found.key.end for found, _ in read.values()] == [False, True, False, False, True]
    assert data.opened == [(1, 3), (0, 6), (0, 3), (1, 15)]


def test_an_iterable_dataset_skips_counted_samples() -> None:
    spec = StreamSpec(0, sources=1, batch_size=4)
    stream = StreamReader(psworker.data.stream_dataset.stream_of(Count(10), 1), list, seed=None)

    assert stream.read(spec, spec.number(0, 2))[1] == [8, 9]


class Noisy:
    def read(self, source: int, offset: int) -> Iterator[tuple[int, float]]:
        return ((place, random.random()) for place in range(offset, 9))


def test_random_numbers_of_a_sample_do_not_depend_on_the_start_of_reading() -> None:
    spec = StreamSpec(0, sources=1, batch_size=3)
    complete, later = (StreamReader(Noisy(), list, seed=5) for _ in range(2))
    together = [complete.read(spec, spec.number(0, place))[1] for place in range(3)]

    assert later.read(spec, spec.number(0, 2))[1] == together[2]
    assert later.read(spec, spec.number(0, 1))[1] == together[1]
    assert len({noise for batch in together for _, noise in batch}) == 9
    assert StreamReader(Noisy(), list, seed=6).read(spec, 0)[1] != together[0]


def test_random_numbers_of_the_script_depend_on_the_batch() -> None:
    def draws() -> list[float]:
        job, _, _ = started()
        return [torch.rand(()).item() for _ in job.batches(Count(7), 2)]

    assert draws() == draws()
    assert len(set(draws())) == 4


def test_a_map_style_data_set_with_a_read_method_is_map_style() -> None:
    class Both:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return index

        def read(self, name: str) -> str:
            return name

    job, _, _ = started()

    assert [batch.tolist() for batch in job.batches(Both(), 4, shuffle=False)] == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"sources": 2}, "Count cannot be read as 2 sources"),
        ({"sources": 0}, "at least 1"),
        ({"drop_last": True}, "drop_last cannot apply"),
        ({"num_workers": 2}, "num_workers cannot apply"),
    ],
)
def test_options_that_a_stream_lacks_are_refused(options: dict[str, Any], problem: str) -> None:
    job, _, _ = started()

    with pytest.raises(InvalidRequestError, match=problem):
        job.batches(Count(4), 2, **options)


def test_a_map_style_data_set_has_no_sources() -> None:
    job, _, _ = started()

    with pytest.raises(InvalidRequestError, match="Tensor cannot be read"):
        job.batches(torch.arange(4), 2, sources=1)
