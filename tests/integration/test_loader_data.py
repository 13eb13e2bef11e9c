"""Sources of loaders on one worker and on two, under each policy: samplers, DataLoaders,
streams.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler

from psworker import InvalidRequestError, Job, MismatchError
from tests.support.cluster import Cluster
from tests.support.policies import POLICIES
from tests.support.training_threads import real, simulated

Make = Callable[..., Cluster]

TRAIN, PASSES = 18, 3

# ---- samplers ------------------------------------------------------------------------------------


class Buckets:
    """Batches of several sizes in a random order."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = [[0, 1, 2, 3, 4, 5], [6], [7, 8, 9], [10, 11], [12, 13, 14, 15, 16, 17]]
        return (batches[number] for number in torch.randperm(len(batches)).tolist())

    def __len__(self) -> int:
        return 5


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "sampler": lambda: {"batch_size": 4, "sampler": RandomSampler(range(TRAIN))},
    "batch_sampler": lambda: {"batch_sampler": Buckets()},
    "DataLoader": lambda: {
        "sampler": SubsetRandomSampler(range(TRAIN)),
        "batch_size": 4,
        "num_workers": 0,
    },
}


def sampling(kind: str) -> Callable[[Job], tuple[list[list[list[int]]], list[int]]]:
    """Train for some passes; return the batches of each, and the lengths."""

    def script(job: Job) -> tuple[list[list[list[int]]], list[int]]:
        model, data = nn.Linear(1, 1), torch.arange(TRAIN)
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model)
        given = SAMPLERS[kind]()
        loader = (
            job.batches(DataLoader(data, **given))
            if kind == "DataLoader"
            else job.batches(data, **given)
        )  # type: ignore[arg-type]
        seen: list[list[list[int]]] = []
        lengths = []
        for _ in range(PASSES):
            seen.append([])
            for batch in loader:
                model(batch[:, None].float()).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                seen[-1].append(batch.tolist())
            lengths.append(len(loader))
        return seen, lengths

    return script


@pytest.mark.every(5)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_each_batch_of_a_sampler_goes_to_one_worker(name: str, workers: int, kind: str) -> None:
    runs = simulated(workers, sampling(kind), **POLICIES[name])
    ((alone, _),) = simulated(1, sampling(kind))

    for number in range(PASSES):
        batches = [batch for seen, _ in runs for batch in seen[number]]
        assert sorted(batches) == sorted(alone[number])
        assert sorted(x for batch in batches for x in batch) == list(range(TRAIN))
    assert len({str(each) for each in alone}) == PASSES
    if name == "sync":
        for rank, (seen, lengths) in enumerate(runs):
            assert seen == [each[rank::workers] for each in alone]
            assert lengths == [len(each) for each in seen]


def test_batches_of_a_batch_sampler_are_weighted_by_their_samples() -> None:
    """Two workers with batches of different sizes make the same step as one with both together."""

    class Pairs:
        def __init__(self, *batches: list[int]) -> None:
            self.batches = batches

        def __iter__(self) -> Iterator[list[int]]:
            return iter(self.batches)

    def script(*batches: list[int]) -> Callable[[Job], list[float]]:
        def run(job: Job) -> list[float]:
            torch.manual_seed(0)
            model = nn.Linear(1, 1)
            optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
            for batch in job.batches(torch.arange(6.0), batch_sampler=Pairs(*batches)):
                model(batch[:, None]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return [
                float(value) for value in nn.utils.parameters_to_vector(model.parameters()).detach()
            ]

        return run

    two = simulated(2, script([0, 1, 2, 3], [4]))
    (one,) = simulated(1, script([0, 1, 2, 3, 4]))

    assert two[0] == two[1] == pytest.approx(one, rel=1e-6)


def test_a_global_batch_refuses_a_batch_sampler(cluster: Make) -> None:
    address = cluster(1, global_batch=8).address

    with pytest.raises(
        InvalidRequestError,
        match=r"--global-batch 8 .*batch_sampler",
    ):
        real(address, 1, sampling("batch_sampler"))


def test_workers_with_different_samplers_get_an_error() -> None:
    """This one depends on the rank, which is no generator that all workers share."""

    def script(job: Job) -> None:
        model = nn.Linear(1, 1)
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        loader = job.batches(torch.arange(6), 2, sampler=ByRank(job.rank))
        for batch in loader:
            model(batch[:, None].float()).mean().backward()
            optimizer.step()

    with pytest.raises(MismatchError, match=r"ByRank .*pass 1 of loader '0' ") as caught:
        simulated(2, script)
    assert caught.value.reason == "LOOP_MISMATCH"


def growing(sizes: Callable[[Job], list[int]]) -> Callable[[Job], list[list[int]]]:
    """Train for a pass over a list at each of these sizes; return the samples of each pass."""

    def script(job: Job) -> list[list[int]]:
        model, data, seen = nn.Linear(1, 1), [0], []
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model)
        loader = job.batches(data, 2)
        for size in sizes(job):
            data[:] = range(size)
            seen.append([])
            for batch in loader:
                model(batch[:, None].float()).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                seen[-1] += batch.tolist()
        return seen

    return script


def test_workers_share_a_data_set_that_grows_alike_on_all_of_them() -> None:
    runs = simulated(2, growing(lambda job: [8, 16, 6]))

    for number, size in enumerate([8, 16, 6]):
        assert sorted(x for seen in runs for x in seen[number]) == list(range(size))


def test_workers_whose_data_sets_grow_differently_get_an_error() -> None:
    with pytest.raises(MismatchError) as caught:
        simulated(2, growing(lambda job: [8, 16 + job.rank]))
    assert caught.value.reason == "LOOP_MISMATCH"
    assert caught.value.exit_code == 11


class ByRank:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        return iter([self.rank, 2, 3, 4, 5, 1 - self.rank])


# ---- streams -------------------------------------------------------------------------------------


class Sources:
    """Source s has the numbers from 10 s on."""

    def read(self, source: int, offset: int) -> Iterator[int]:
        return iter(range(10 * source + offset, 10 * source + 5))


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_stream_is_read_in_each_pass_even_without_steps(name: str, workers: int) -> None:
    def script(job: Job) -> list[list[int]]:
        model, seen = nn.Linear(1, 1), []
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model)
        train, test = (job.batches(Sources(), batch_size=2, sources=2) for _ in range(2))
        for _ in range(2):
            for loader, trains in ((train, True), (test, False)):
                seen.append([])
                with torch.set_grad_enabled(trains):
                    for batch in loader:
                        seen[-1] += batch.tolist()
                        if trains:
                            model(batch[:, None].float()).mean().backward()
                            optimizer.step()
        return seen

    runs = simulated(workers, script, **POLICIES[name])

    for number in range(4):
        assert sorted(x for run in runs for x in run[number]) == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
