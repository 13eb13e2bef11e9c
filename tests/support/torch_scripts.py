"""Training of one model on two workers and two servers, and in one torch process."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from psworker import Job
from tests.support.training_threads import simulated

WORKERS = 2
ROUNDS = 6
Named = dict[str, Tensor]
Compute = Callable[[nn.Module, int, int], None]


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_fixed_parameters(model: nn.Module) -> nn.Module:
    """Return the module in float64, with the same parameters for each worker."""
    model.double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(noise(*parameter.shape, seed=number) * 0.4)
    return model


def compute_gradient(model: nn.Module, rank: int, number: int) -> None:
    """Compute the gradient of some batch, another one for each worker and round."""
    x = noise(5, 6, seed=100 + 10 * number + rank)
    F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()


def make_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def copy_state(model: nn.Module) -> Named:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train_on_servers(
    make: Callable[[], nn.Module],
    compute: Compute = compute_gradient,
    optimize: Callable[[nn.Module], torch.optim.Optimizer] = make_adam,
) -> list[list[Named]]:
    """Return the model's state after each round, by worker."""

    def script(job: Job) -> list[Named]:
        model, states = make(), []
        optimizer = job.optimizer(optimize(model), model)
        for number in range(ROUNDS):
            compute(model, job.rank, number)
            optimizer.step()
            optimizer.zero_grad()
            states.append(copy_state(model))
        return states

    return simulated(WORKERS, script, shards=2)


def train_plain(
    make: Callable[[], nn.Module],
    compute: Compute = compute_gradient,
    optimize: Callable[[nn.Module], torch.optim.Optimizer] = make_adam,
) -> list[Named]:
    """Return the state after each round in one torch process."""
    model, states = make(), []
    optimizer = optimize(model)
    for number in range(ROUNDS):
        twins = [copy.deepcopy(model) for _ in range(WORKERS)]
        for rank, twin in enumerate(twins):
            compute(twin, rank, number)
        _copy_switches(model, twins[0])
        for parameter, *theirs in zip(
            model.parameters(), *(twin.parameters() for twin in twins), strict=True
        ):
            stored = [each.grad / WORKERS for each in theirs if each.grad is not None]
            parameter.grad = torch.stack(stored).sum(0) if stored else None
        for buffer, *theirs in zip(
            model.buffers(), *(twin.buffers() for twin in twins), strict=True
        ):
            buffer.copy_(torch.stack(theirs).mean(0) if buffer.is_floating_point() else theirs[0])
        optimizer.step()
        model.zero_grad()
        states.append(copy_state(model))
    return states


def _copy_switches(model: nn.Module, twin: nn.Module) -> None:
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        mine.requires_grad_(other.requires_grad)


def assert_alike(runs: list[list[Named]], expected: list[Named]) -> None:
    """Check that all workers agree bit by bit, and with the expected within float64's rounding."""
    for round_, states in enumerate(zip(*runs, expected, strict=True)):
        *workers, other = states
        for name, value in other.items():
            assert all(torch.equal(worker[name], workers[0][name]) for worker in workers), (
                round_,
                name,
            )
            assert torch.allclose(workers[0][name], value, rtol=1e-11, atol=1e-12), (round_, name)
