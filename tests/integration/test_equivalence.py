"""Sync on several workers and servers equals plain torch: the mean of the same micro-batches, one
step. Every weight within 1e-6 (float32) or 1e-12 (float64), relative to the largest of its tensor,
of one torch process.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pscommon.core.data_loop import LoopSpec
from pscommon.optim import KINDS
from pscommon.snapshot import weights_sha256
from psworker import Job
from tests.support.cluster import Cluster
from tests.support.optimizer_cases import CASES
from tests.support.training_threads import real, simulated

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
BATCH = 8
STEPS = 105
"""7 batches an epoch, of which the last has 2 samples, and 15 epochs for each worker."""

Named = dict[str, Tensor]
Groups = list[dict[str, Any]]
Make = Callable[[Groups], torch.optim.Optimizer]


def maker(name: str, hyper: dict[str, Any]) -> Make:
    return lambda groups: KINDS[name].torch_class(groups, **hyper)  # type: ignore[no-any-return]


OPTIMIZERS = {name: maker(name, cases.training) for name, cases in CASES.items()}
OTHER_SETTINGS: dict[str, Make] = {
    "plain sgd": lambda groups: torch.optim.SGD(groups, lr=0.02),
    "damped sgd": lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.8, dampening=0.3),
    "adam that maximizes": lambda groups: torch.optim.Adam(groups, lr=1e-4, maximize=True),
    "plain rmsprop": lambda groups: torch.optim.RMSprop(
        groups, lr=1e-3, alpha=0.9, eps=1e-3, weight_decay=1e-3
    ),
}


class Net(nn.Module):
    """Odd shapes, a tensor of a single number, and embeddings, whose gradients have zeros."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 5)
        self.hidden = nn.Linear(5, 17)
        self.norm = nn.LayerNorm(17)
        self.output = nn.Linear(17, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.output(self.norm(self.hidden(self.words(x).mean(1)).tanh())) * self.scale
        return out


def nets() -> nn.ModuleDict:
    """Return a float32 and a float64 model, trained as one, with the same weights for each
    worker.
    """
    both, generator = (
        nn.ModuleDict({str(dtype)[6:]: Net(dtype) for dtype in TOLERANCE}),
        torch.Generator(),
    )
    generator.manual_seed(3)
    with torch.no_grad():
        for parameter in both.parameters():
            parameter.copy_(
                torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 0.5
            )
    return both


def data() -> tuple[Tensor, Tensor]:
    x = torch.randint(0, 11, (50, 6), generator=torch.Generator().manual_seed(4))
    return x, x.sum(1) % 3


def groups(model: nn.Module) -> Groups:
    """Return two groups: biases and norms have another learning rate and no decay."""
    large, small = (
        [p for p in model.parameters() if (p.ndim > 1) is flat] for flat in (True, False)
    )
    return [{"params": large}, {"params": small, "weight_decay": 0.0, "lr": 1e-3}]


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def loss(model: nn.ModuleDict, x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([F.cross_entropy(net(x), y).double() for net in model.values()]).sum()


def script(make: Make, epochs: int) -> Callable[[Job], Named]:
    """Run a user's training script; return the final weights of this worker."""

    def train(job: Job) -> Named:
        model = nets()
        optimizer = job.optimizer(make(groups(model)), model)
        scheduler = schedule(optimizer)
        for x, y in job.batches(data(), BATCH, epochs, seed=5, reseed=False):
            loss(model, x, y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    return train


def plain(make: Make, workers: int, epochs: int) -> Named:
    """Train in one torch process with the weighted mean of the micro-batches of each round."""
    model = nets()
    parameters = list(model.parameters())
    optimizer = make(groups(model))
    scheduler = schedule(optimizer)
    for batches in rounds(workers, epochs):
        total = sum(len(y) for _, y in batches)
        means = [torch.zeros_like(p) for p in parameters]
        for x, y in batches:
            for mean, gradient in zip(
                means, torch.autograd.grad(loss(model, x, y), parameters), strict=True
            ):
                mean += gradient * (len(y) / total)
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.grad = mean
        optimizer.step()
        scheduler.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def rounds(workers: int, epochs: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Return the micro-batches of each round in worker order."""
    (x, y), loop = data(), LoopSpec(0, size=50, batch_size=BATCH, epochs=epochs, seed=5)
    for first in range(0, loop.total, workers):
        numbers = range(first, min(first + workers, loop.total))
        indices = [torch.from_numpy(loop.indices(number).copy()) for number in numbers]
        yield [(x[chosen], y[chosen]) for chosen in indices]


def assert_equivalent(mine: Named, theirs: Named) -> None:
    for name, value in theirs.items():
        error = (mine[name] - value).abs().max() / value.abs().max()
        assert error <= TOLERANCE[value.dtype], (
            f"{name} is off by {error:.2g} of its largest number"
        )


def digests(results: Iterable[Named]) -> set[str]:
    return {
        weights_sha256({name: value.numpy() for name, value in weights.items()})
        for weights in results
    }


@pytest.mark.every(36)
@pytest.mark.parametrize(("name", "workers"), list(product(OPTIMIZERS, [1, 2, 3])))
def test_sync_equals_plain_torch_with_the_same_bytes_on_any_number_of_shards(
    name: str, workers: int
) -> None:
    make, epochs = OPTIMIZERS[name], 15 * workers

    results = [
        weights
        for shards in (1, 2, 3)
        for weights in simulated(workers, script(make, epochs), shards=shards)
    ]

    assert len(digests(results)) == 1
    assert_equivalent(results[0], plain(make, workers, epochs))


@pytest.mark.full
@pytest.mark.parametrize("name", OTHER_SETTINGS)
def test_other_settings_equal_those_in_torch(name: str) -> None:
    make = OTHER_SETTINGS[name]

    results = simulated(2, script(make, epochs=30), shards=2)

    assert_equivalent(results[0], plain(make, 2, epochs=30))


def test_the_last_round_may_have_fewer_workers() -> None:
    """7 batches for 3 workers: the third round has one."""
    make = OPTIMIZERS["adam"]

    results = simulated(3, script(make, epochs=1), shards=2)

    assert len(digests(results)) == 1
    assert_equivalent(results[0], plain(make, 3, epochs=1))


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["sgd", "adamw", "nadam"])
def test_every_run_over_the_network_gives_the_same_bytes(
    name: str, cluster: Callable[..., Cluster]
) -> None:
    """Real servers and threads, repeated on 1, 2 and 3 shards, as in one process step by step."""
    make, epochs = OPTIMIZERS[name], 5
    results = simulated(2, script(make, epochs), shards=1)
    for shards in (1, 2, 2, 3):
        results += real(cluster(shards=shards, min_workers=2).address, 2, script(make, epochs))

    assert len(digests(results)) == 1
    assert_equivalent(results[0], plain(make, 2, epochs))


@pytest.mark.parametrize("shards", [1, 4])
def test_more_shards_than_tensors_train_the_same(
    cluster: Callable[..., Cluster], shards: int
) -> None:
    """One tensor of three numbers: three of the four servers hold none of it."""
    numbers = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def train(job: Job) -> Tensor:
        model = nn.ParameterDict({"numbers": numbers.detach().clone()})
        optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.1), model)
        for _ in range(5):
            (model["numbers"] ** 2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model["numbers"].detach()

    results = real(cluster(shards, min_workers=2).address, 2, train)

    optimizer = torch.optim.Adam([numbers], lr=0.1)
    for _ in range(5):
        numbers.grad = 2 * numbers.detach()
        optimizer.step()
    assert torch.equal(results[0], results[1])
    assert torch.allclose(results[0], numbers, rtol=1e-6)


def test_ssp_with_bound_0_equals_sync_bit_by_bit(cluster: Callable[..., Cluster]) -> None:
    train = script(OPTIMIZERS["sgd"], epochs=5)

    results = simulated(2, train, policy="sync") + simulated(2, train, policy="ssp", staleness=0)
    results += real(cluster(policy="ssp", staleness=0, min_workers=2).address, 2, train)

    assert len(digests(results)) == 1


def test_the_comparison_detects_a_difference() -> None:
    """A learning rate that is wrong by one part in ten thousand."""
    make = OPTIMIZERS["sgd"]
    wrong = plain(
        lambda groups: torch.optim.SGD(groups, lr=0.010001, momentum=0.9, nesterov=True), 2, 2
    )

    with pytest.raises(AssertionError, match="is off by"):
        assert_equivalent(wrong, plain(make, 2, 2))
