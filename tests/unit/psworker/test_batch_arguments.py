"""Arguments of `job.batches`: what is accepted, and what is refused at the call."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pscommon.core.data_loop import LoopSpec
from pscommon.core.errors import InvalidRequestError
from psworker.client.local_client import LocalClient
from psworker.data.map_dataset import tensor_rows
from psworker.job import Job
from psworker.optim.optimizer import ServerOptimizer
from tests.support.loader_ledger import Ledger


def started(client: LocalClient | None = None) -> tuple[Job, ServerOptimizer]:
    job, model = Job(client or LocalClient()), nn.Linear(1, 1)
    return job, job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


NUMBERS = torch.arange(10.0)


@pytest.mark.parametrize("dataset", [iter(range(3)), None])
def test_data_that_is_neither_map_style_nor_a_stream_is_refused(dataset: Any) -> None:
    job, _ = started()

    with pytest.raises(InvalidRequestError, match="cannot read a"):
        job.batches(dataset, 4)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ((), "this one has none"),
        ((np.zeros(3), torch.zeros(3)), "this one has ndarray"),
        ((torch.zeros(3), torch.zeros(4)), r"shapes are \[\[3\], \[4\]\]"),
        ((torch.zeros(()), torch.zeros(4)), "different numbers of rows"),
    ],
)
def test_a_tuple_without_rows_of_tensors_is_refused(dataset: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        tensor_rows(dataset)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_size": 2.0}, "not valid: 'float'"),
        ({"batch_size": 2, "epochs": None}, "not valid: 'NoneType'"),
        ({"batch_size": 2, "seed": 1.5}, "seed=1.5"),
        ({"batch_size": 2, "seed": 2**64}, "seed=18446744073709551616"),
        ({"batch_size": 2, "nun_workers": 1}, "^nun_workers"),
    ],
)
def test_invalid_arguments_are_refused_at_the_call(given: dict[str, Any], message: str) -> None:
    job, _ = started(client := Ledger())
    with pytest.raises(InvalidRequestError, match=message):
        job.batches(range(4), **given)
    next(iter(job.batches(range(4), batch_size=2)))
    assert client.loops == [LoopSpec(0, 4, 2)]


def test_64_bit_seeds_and_numpy_numbers_are_accepted() -> None:
    job, _ = started(client := Ledger())
    next(iter(job.batches(range(4), batch_size=np.int64(2), epochs=np.int32(1), seed=2**64 - 1)))
    spec = client.loops[0]
    assert spec == LoopSpec(0, 4, 2, 1, seed=-1)
    assert [type(value) for value in (spec.batch_size, spec.epochs)] == [int, int]


def test_an_open_file_is_refused() -> None:
    job, _ = started(Ledger())
    with open(__file__) as file, pytest.raises(InvalidRequestError, match="open file"):
        job.batches(file, batch_size=2)


def test_an_empty_batch_size_and_a_missing_optimizer_are_refused() -> None:
    job, _ = started()

    with pytest.raises(InvalidRequestError, match="batch_size must be at least 1"):
        job.batches(NUMBERS, 0)
    with pytest.raises(InvalidRequestError, match="no model yet"):
        next(iter(Job(LocalClient()).batches(NUMBERS, 4)))
