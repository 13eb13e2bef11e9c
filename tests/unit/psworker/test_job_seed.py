"""The seed of a job: what `torch.manual_seed` of a script changes, and what it does not."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, RandomSampler

from pscommon.core.data_loop import LoopSpec
from pscommon.core.errors import InvalidRequestError
from psworker.data.random_state import preserved_generators, reseed, script_seed
from psworker.job import Job
from psworker.optim.optimizer import ServerOptimizer
from tests.support.loader_ledger import Ledger

NUMBERS = torch.arange(12.0)


@pytest.fixture(autouse=True)
def generators() -> Iterator[None]:
    with preserved_generators():
        yield


def started() -> tuple[Job, ServerOptimizer, Ledger]:
    client = Ledger()
    job, model = Job(client), nn.Linear(1, 1)
    return job, job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model), client


class Noisy:
    """Augmented samples: a number and a random one."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, torch.rand(()).item(), np.random.random()])


class NoisyStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.stack([torch.tensor(float(n)), torch.rand(())]) for n in range(12))


LOADERS: dict[str, Callable[[Job, Any], Any]] = {
    "shuffled": lambda job, seed: job.batches(Noisy(), 4, **seed),
    "processes": lambda job, seed: job.batches(Noisy(), 4, num_workers=1, **seed),
    "sampler": lambda job, seed: job.batches(Noisy(), 4, sampler=RandomSampler(range(12)), **seed),
    "stream": lambda job, seed: job.batches(NoisyStream(), 4, **seed),
}


def run(kind: str, script: int | None = None, **given: Any) -> list[Any]:
    """Train for two passes; return samples, and dropout masks.

    script: The seed of the script.
    given: Arguments of job.batches.
    """
    if script is not None:
        torch.manual_seed(script)
    job, optimizer, _ = started()
    loader, seen = LOADERS[kind](job, given), []
    for _ in range(2):
        for batch in loader:
            seen.append([batch.tolist(), nn.functional.dropout(torch.ones(8)).tolist()])
            optimizer.step()
    return seen


@pytest.mark.parametrize("kind", LOADERS)
def test_the_seed_of_a_script_decides_order_augmentation_and_dropout(kind: str) -> None:
    one, again, other = run(kind, 5), run(kind, 5), run(kind, 6)

    assert one == again
    for place in (0, 1):
        assert [step[place] for step in one] != [step[place] for step in other]
    assert run(kind, 5, seed=9) == run(kind, 6, seed=9) != one
    assert run(kind, seed=5) == one


@pytest.mark.parametrize("seed", [0, 2**64 - 1, -1, -(2**63)])
def test_each_seed_of_torch_is_a_seed(seed: int) -> None:
    assert run("shuffled", seed) == run("shuffled", 1, seed=seed)


def test_the_seeds_of_batches_are_not_those_of_the_script() -> None:
    """A second job of the process has the order of the first."""
    first, second = run("shuffled", 5), run("shuffled")

    assert first == second


def test_a_seed_after_the_registration_changes_nothing() -> None:
    job, optimizer, client = started()
    loader = job.batches(NUMBERS, 4)
    for seed in (1, 2):
        torch.manual_seed(seed)
        for _ in loader:
            optimizer.step()

    seeds = {spec.seed for spec in client.loops if isinstance(spec, LoopSpec)}
    assert seeds == {client.seed}
    assert client.seed not in (1, 2)


def test_a_loader_may_be_made_and_measured_before_the_model_is_registered() -> None:
    client = Ledger()
    job, model = Job(client), nn.Linear(1, 1)
    loader = job.batches(NUMBERS, 4)
    assert len(loader) == 3
    with pytest.raises(InvalidRequestError, match="no model yet"):
        iter(loader)

    torch.manual_seed(5)
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in loader:
        optimizer.step()

    assert [spec.seed for spec in client.loops if isinstance(spec, LoopSpec)] == [5]


def test_several_optimizers_have_the_seed_at_the_last_of_them() -> None:
    client = Ledger()
    job, nets = Job(client), {name: nn.Linear(1, 1) for name in "dg"}
    for seed, (name, net) in enumerate(nets.items(), 5):
        torch.manual_seed(seed)
        job.optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net, name=name)
    torch.manual_seed(9)
    next(iter(job.batches(NUMBERS, 4)))

    assert [spec.seed for spec in client.loops if isinstance(spec, LoopSpec)] == [6]


def test_the_script_seed_is_found_behind_seeds_of_batches() -> None:
    torch.manual_seed(5)
    assert script_seed.read() == 5
    for number in range(2):
        reseed(number)
        with preserved_generators():
            reseed(7, number)
        assert script_seed.read() == 5
        with preserved_generators():
            torch.manual_seed(8)
            assert script_seed.read() == 8
            reseed(8)
            assert script_seed.read() == 8
        assert script_seed.read() == 5
    torch.manual_seed(6)
    assert script_seed.read() == 6
