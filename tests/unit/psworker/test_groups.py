"""The ranks of a group without servers: one job, in which each computes a part of each batch."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from pscommon.core.errors import InvalidRequestError, MismatchError, WaitTimeoutError
from psworker import Job
from psworker.client.local_client import LocalClient
from psworker.core.group_place import ALONE, GroupPlace
from psworker.core.results import CollectiveCall
from psworker.data.data_source import seeds_of
from psworker.group.client import combined
from psworker.session.arguments import group_place
from tests.support.groups import as_group, group_client

ROWS = 50
BATCH = 4


def data() -> tuple[Tensor, Tensor]:
    rows = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(5))
    return rows, rows.sum(1, keepdim=True)


def small_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) + number)
    return model


def train(
    batch_size: int,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    epochs: int = 2,
    **options: Any,
) -> Callable[[Job, int], dict[str, Tensor]]:
    def script(job: Job, rank: int) -> dict[str, Tensor]:
        model = small_model()
        optimizer = job.optimizer(make(list(model.parameters())), model)
        for x, y in job.batches(data(), batch_size=batch_size, epochs=epochs, seed=1, **options):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    return script


def alone(script: Callable[[Job, int], dict[str, Tensor]]) -> dict[str, Tensor]:
    with Job(LocalClient()) as job:
        return script(job, 0)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def assert_equal(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float
) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=tolerance * float(value.abs().max())
        )


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("make", "tolerance"), [(sgd, 1e-6), (adam, 1e-5)])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_group_equals_one_process_with_its_whole_batch(
    size: int, make: Any, tolerance: float, drop_last: bool
) -> None:
    """50 rows are no multiple of the batch, so the last one is uneven."""
    ranks = as_group(size, LocalClient, train(BATCH, make, drop_last=drop_last))

    for rank in ranks[1:]:
        assert_equal(rank, ranks[0], 0)
    assert_equal(ranks[0], alone(train(size * BATCH, make, drop_last=drop_last)), tolerance)


def test_a_group_gives_the_same_bits_each_time() -> None:
    first, second = (as_group(3, LocalClient, train(BATCH, sgd))[0] for _ in range(2))
    assert_equal(second, first, 0)


def test_a_rank_without_a_row_computes_but_does_not_count() -> None:
    """The last batch has one row, and there are three ranks."""

    def script(job: Job, rank: int) -> list[int]:
        model = nn.Linear(1, 1)
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        sizes = []
        for (x,) in job.batches((torch.ones(7, 1),), batch_size=2, shuffle=False):
            sizes.append(len(x))
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return sizes

    assert as_group(3, LocalClient, script) == [[2, 1], [2, 1], [2, 1]]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_each_row_of_a_batch_counts_on_one_rank(size: int) -> None:
    for length in range(12):
        rows = list(range(length))
        parts = [GroupPlace(rank, size).own(rows) for rank in range(size)]

        assert [row for part, count in parts for row in part[:count]] == rows
        assert all(part or not rows for part, _ in parts)
        counts = [count for _, count in parts]
        assert max(counts) - min(counts) <= 1


def test_all_ranks_read_a_stream_and_each_keeps_its_part() -> None:
    class Numbers(IterableDataset[float]):
        def __iter__(self) -> Iterator[float]:
            return iter(float(number) for number in range(7))

    def script(job: Job, rank: int) -> list[list[float]]:
        model = nn.Linear(1, 1)
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        found = []
        for x in job.batches(Numbers(), batch_size=2):
            found.append(x.tolist())
            model(x.float()[:, None]).sum().backward()
            optimizer.step()
        return found

    first, second = as_group(2, LocalClient, script)
    assert first == [[0, 1], [4]]
    assert second == [[2, 3], [5, 6]]


def test_buffers_are_combined_like_those_of_workers() -> None:
    """Averages are weighted by samples; others are those of rank 0."""

    def script(job: Job, rank: int) -> tuple[float, float]:
        model = nn.BatchNorm1d(1, momentum=None)
        model.register_buffer("own", torch.tensor(float(rank)))
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        values = torch.tensor([0.0, 0, 0, 6, 6]).view(5, 1)
        for (x,) in job.batches((values,), batch_size=3, shuffle=False):
            model(x).sum().backward()
            optimizer.step()
        return float(model.running_mean), float(model.own)

    # two rows of rank 0 (mean 0), three of rank 1 (mean 4)
    assert as_group(2, LocalClient, script) == [(pytest.approx(2.4), 0.0)] * 2


def test_a_tensor_that_only_one_rank_uses_has_its_part_of_the_mean() -> None:
    def script(job: Job, rank: int) -> list[float]:
        model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(3)])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        for (x,) in job.batches((torch.ones(2, 1),), batch_size=1):
            (model[0](x) + (model[1](x) if rank else 0)).sum().backward()
            optimizer.step()
        return [parameter.item() for parameter in model.parameters()]

    assert as_group(2, LocalClient, script) == [[0.0, 0.5, 1.0]] * 2


def test_each_rank_draws_its_own_numbers() -> None:
    """A worker of one process has the seeds that it had before there were groups."""
    seeds = [seeds_of(GroupPlace(rank, 3), 7, 8) for rank in range(3)]

    assert len(set(seeds)) == 3
    assert seeds_of(ALONE, 7, 8) == (7, 8)


def test_a_group_begins_one_job_after_another() -> None:
    """As in k-fold cross-validation: the connections between the ranks stay."""

    def script(job: Job, rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        first = train(BATCH, sgd)(job, rank)
        job.close()
        with Job(group_client(job.client._link, LocalClient)) as second:
            return first, train(BATCH, sgd)(second, rank)

    for first, second in as_group(2, LocalClient, script):
        assert_equal(second, first, 0)


def test_grad_scaler_leaves_a_step_out_on_all_ranks() -> None:
    def script(job: Job, rank: int) -> int:
        model = nn.Linear(1, 1)
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for number, (x,) in enumerate(job.batches((torch.ones(8, 1),), batch_size=2)):
            model(x).sum().backward()
            optimizer.found_inf = torch.tensor(float(rank == 1 and number == 0))
            optimizer.step()
            optimizer.zero_grad()
        return job.version

    assert as_group(2, LocalClient, script) == [1, 1]


def test_collective_calls_add_up_in_the_group_first() -> None:
    def script(job: Job, rank: int) -> tuple[Any, ...]:
        job.barrier()
        mean = job.all_reduce({"a": rank}, samples=rank)
        value = job.broadcast("second" if rank == 1 else None)
        return mean, value, job.rank, job.workers, job.is_first

    first, second, third = as_group(3, LocalClient, script)
    assert first == ({"a": pytest.approx(5 / 3)}, "second", 0, 1, True)
    assert second == third == (*first[:4], False)


@pytest.mark.parametrize(
    ("samples", "mean", "weight"), [([1, 3], 2.5, 4), ([0, 2], 3.0, 2), ([0, 0], 1.0, 0)]
)
def test_the_mean_of_a_group_is_weighted(samples: list[int], mean: float, weight: int) -> None:
    calls = [
        CollectiveCall("all_reduce", {"x": value}, count)
        for value, count in zip([1.0, 3.0], samples, strict=True)
    ]

    assert combined(calls, range(len(calls))) == CollectiveCall("all_reduce", {"x": mean}, weight)


def test_the_lowest_rank_that_reports_a_name_counts() -> None:
    worker = LocalClient()

    def script(job: Job, rank: int) -> None:
        job.report(**({"loss": rank} if rank else {"other": 7}))

    as_group(3, lambda: worker, script)
    assert {"loss": 1.0, "other": 7.0}.items() <= worker.metrics.items()


def test_all_ranks_leave_after_the_same_step() -> None:
    worker = LocalClient()

    def script(job: Job, rank: int) -> int:
        model = nn.Linear(1, 1)
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        steps = 0
        try:
            for (x,) in job.batches((torch.ones(40, 1),), batch_size=1):
                if steps == 3 and rank == 0:
                    worker.stopping = True
                model(x).sum().backward()
                optimizer.step()
                steps += 1
        except SystemExit:
            return steps
        return -1

    assert as_group(2, lambda: worker, script) == [4, 4]


def test_different_calls_are_an_error_on_all_ranks() -> None:
    errors: dict[int, str] = {}

    def script(job: Job, rank: int) -> None:
        try:
            if rank == 1:
                job.barrier()
            else:
                job.all_reduce({"x": 1.0})
        except MismatchError as error:
            errors[rank] = str(error)

    with pytest.raises(MismatchError):  # again, when a rank closes its job
        as_group(3, LocalClient, script)
    assert errors.keys() == {0, 1, 2}
    assert "rank 0 all_reduce, rank 1 barrier" in errors[0]


def test_different_models_are_an_error_on_all_ranks() -> None:
    def script(job: Job, rank: int) -> str:
        model = nn.Linear(3, 1 + rank // 2)
        with pytest.raises(MismatchError) as caught:
            job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        return str(caught.value)

    first, *others = as_group(3, LocalClient, script)
    assert "rank 0 and rank 2" in first
    assert "weight" in first
    assert others == [first, first]


def test_a_rank_that_hangs_is_named() -> None:
    def script(job: Job, rank: int) -> None:
        if rank == 1:
            return
        with pytest.raises(WaitTimeoutError, match="did not call barrier"):
            job.barrier()

    with pytest.raises(MismatchError):  # the other rank closes its job instead
        as_group(2, LocalClient, script, timeout=0.1)


@pytest.mark.parametrize(
    "options", [{"overlap": True}, {"pipeline": True}], ids=["overlap", "pipeline"]
)
def test_a_group_refuses_overlap_and_pipeline(options: dict[str, bool]) -> None:
    def script(job: Job, rank: int) -> None:
        model = nn.Linear(1, 1)
        with pytest.raises(InvalidRequestError, match="a group excludes"):
            job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)

    as_group(1, LocalClient, script)


def test_a_group_refuses_a_batch_sampler() -> None:
    def script(job: Job, rank: int) -> None:
        with pytest.raises(InvalidRequestError, match="batch_sampler"):
            job.batches(np.arange(4), batch_sampler=[[0, 1], [2, 3]])

    as_group(2, LocalClient, script)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "RANK and WORLD_SIZE"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "0 to 1"),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "one machine"),
    ],
)
def test_places_that_are_none_are_refused(variables: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        group_place({"PS_GROUP": "1", **variables})


def test_a_process_without_the_variable_is_in_no_group() -> None:
    assert group_place({"RANK": "0", "WORLD_SIZE": "2"}) is None
