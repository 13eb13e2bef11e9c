"""Lion as in Chen et al. 2023, Program 1, in plain PyTorch scripts; on servers:
tests/unit/psserver/test_store_torch.py.
"""

from typing import Any

import numpy as np
import pytest
import torch

import psworker
from pscommon.optim import ElementwiseOptimizer
from pscommon.optim.specs import spec_of


def published_lion(
    weight: Any, gradients: Any, lr: float, betas: tuple[float, float], decay: float
) -> Any:
    """The published program, in double precision."""
    momentum = np.zeros_like(weight)
    for gradient in gradients:
        update = np.sign(momentum * betas[0] + gradient * (1 - betas[0]))
        momentum = gradient * (1 - betas[1]) + momentum * betas[1]
        update = update + weight * decay
        weight = weight - update * lr
    return weight


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_hundred_steps_equal_those_of_the_paper(decay: float, maximize: bool) -> None:
    rng = np.random.default_rng(1)
    start, gradients = rng.normal(size=(7, 5)), rng.normal(size=(100, 7, 5))
    weight = torch.nn.Parameter(torch.tensor(start))
    optimizer = psworker.Lion(
        [weight], lr=0.01, betas=(0.8, 0.95), weight_decay=decay, maximize=maximize
    )
    for gradient in gradients:
        weight.grad = torch.tensor(-gradient if maximize else gradient)
        optimizer.step()

    expected = published_lion(start, gradients, 0.01, (0.8, 0.95), decay)
    np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-12, atol=1e-12)


def test_lion_is_a_torch_optimizer() -> None:
    """Closures, schedulers, groups, parameters without a gradient, and state_dict() work as in
    torch.
    """
    one, two = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = psworker.Lion([{"params": [one]}, {"params": [two], "lr": 0.5}], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = one.square().sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    scheduler.step()
    other = psworker.Lion([{"params": [one]}, {"params": [two]}])
    other.load_state_dict(optimizer.state_dict())

    assert loss.item() == 3.0
    assert torch.equal(two, torch.ones(3))
    assert two not in optimizer.state
    torch.testing.assert_close(one.detach(), torch.full((3,), 0.9))
    assert [group["lr"] for group in other.param_groups] == [0.05, 0.25]
    assert torch.equal(other.state[one]["exp_avg"], optimizer.state[one]["exp_avg"])
    assert [group["lr"] for group in spec_of(other).groups] == [0.05, 0.25]


@pytest.mark.parametrize("values", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"weight_decay": -0.1}])
def test_values_out_of_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(values))}"):
        psworker.Lion([torch.nn.Parameter(torch.zeros(1))], **values)


def test_sparse_gradients_are_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.zeros(3).to_sparse()

    with pytest.raises(RuntimeError, match="Lion supports only dense real gradients"):
        psworker.Lion([weight]).step()


def test_an_unregistered_subclass_is_refused() -> None:
    class Other(ElementwiseOptimizer):
        pass

    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.zeros(3)

    with pytest.raises(psworker.UnsupportedOptimizerError, match="Other cannot step"):
        Other([weight], {}).step()
