"""Models and training steps that a naive overlap would compute incorrectly."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from psworker.job import Job
from tests.support.late_client import LateClient

Make = Callable[[], nn.Module]
Step = Callable[[nn.Module, torch.optim.Optimizer, int], None]


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)


def backward(model: nn.Module, number: int) -> None:
    x, y = batch(number)
    F.mse_loss(model(x), y).backward()


def usual(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    backward(model, number)
    optimizer.step()
    optimizer.zero_grad()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.out.weight = self.into.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.relu(self.into(x)))
        return out[:, :2]


class Borrowing(nn.Module):
    """Uses the weights of a module that it never calls, as MultiheadAttention does."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.last, self.lent = nn.Linear(4, 2), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.attention(x[None], x[None], x[None])[0][0]
        out: Tensor = self.last(seen @ self.lent.weight)
        return out


class Early(nn.Module):
    """Reads the weights of its parts before it calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron()

    def forward(self, x: Tensor) -> Tensor:
        size = sum(p.mean() for p in self.net.parameters())
        out: Tensor = self.net(x) * (1 + size)
        return out


class Branches(nn.Module):
    """Calls one of two layers, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.layers[self.calls // 3 % 2](x)
        return out


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), normed(), nn.Linear(2, 2)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant))
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 3, batch_first=True)
        self.output = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.output(self.lstm(x.view(-1, 2, 2))[0][:, -1])
        return out


class Flat(nn.LSTM):
    """Moves all weights to other memory as cuDNN does, through stored references."""

    def flatten_parameters(self) -> None:
        for weight in getattr(self, "_flat_weights", ()):
            weight.data = weight.data.clone()


class Flattening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.lstm, self.output = (
            nn.Linear(4, 4),
            Flat(2, 3, batch_first=True),
            nn.Linear(3, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        self.lstm.flatten_parameters()
        out: Tensor = self.output(self.lstm(self.into(x).view(-1, 2, 2))[0][:, -1])
        return out


def hooked_norm() -> nn.Module:
    """A hook of the layer computes its weight from two parameters before forward."""
    layer = nn.Linear(4, 2)
    with pytest.warns(FutureWarning, match="deprecated"):
        return nn.Sequential(nn.utils.weight_norm(layer))


def half_frozen() -> nn.Module:
    model = perceptron()
    model[2].requires_grad_(False)
    return model


MODELS: dict[str, Make] = {
    "perceptron": perceptron,
    "batch norm": normed,
    "tied": Tied,
    "borrowing": Borrowing,
    "early": Early,
    "branches": Branches,
    "checkpoint": lambda: Checkpointed(reentrant=False),
    "reentrant checkpoint": lambda: Checkpointed(reentrant=True),
    "recurrent, parametrized": Recurrent,
    "flattening": Flattening,
    "weight norm by hooks": hooked_norm,
    "half frozen": half_frozen,
}


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    for part in range(3):
        backward(model, 10 * number + part)
    optimizer.step()
    optimizer.zero_grad()


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    backward(model, number)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def replaced(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    backward(model, number)
    first, second, *_ = (p for p in model.parameters() if p.grad is not None)
    assert second.grad is not None
    first.grad, second.grad = None, 2 * second.grad
    optimizer.step()
    optimizer.zero_grad()


def zeroed(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    backward(model, number)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def unscaled(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Change gradients without a version change, as torch.amp.GradScaler does."""
    x, y = batch(number)
    (1024 * F.mse_loss(model(x), y)).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    torch._amp_foreach_non_finite_check_and_unscale_(
        grads, torch.zeros(1), torch.tensor([1 / 1024])
    )
    optimizer.step()
    optimizer.zero_grad()


def behind(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Change gradients without a version change, some only in the sign of zero."""
    backward(model, number)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.mul_(-1.0)
    optimizer.step()
    optimizer.zero_grad()


def evaluated(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    usual(model, optimizer, number)
    model.eval()
    with torch.no_grad():
        assert model(batch(number)[0]).isfinite().all()
    model.train()


def closed(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        x, y = batch(number)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    assert optimizer.step(closure).isfinite()


def unfrozen(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    next(model.parameters()).requires_grad_(number % 3 != 1)
    usual(model, optimizer, number)


STEPS: dict[str, Step] = {
    "usual": usual,
    "accumulated": accumulated,
    "clipped": clipped,
    "replaced": replaced,
    "zeroed": zeroed,
    "unscaled": unscaled,
    "behind torch's back": behind,
    "evaluated": evaluated,
    "closure": closed,
    "unfrozen": unfrozen,
}


def seeded(make: Make) -> nn.Module:
    torch.manual_seed(1)
    return make()


def both(
    make: Make, **choice: Any
) -> tuple[tuple[nn.Module, Any], tuple[nn.Module, Any], LateClient]:
    """Return the model with a plain optimizer, its twin with a job's, and the job's client."""
    client, (model, twin) = LateClient(), (seeded(make) for _ in range(2))
    return (
        (model, adam(model)),
        (twin, Job(client).optimizer(adam(twin), twin, **({"overlap": True} | choice))),
        client,
    )


def assert_equal(model: nn.Module, twin: nn.Module) -> None:
    theirs = twin.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name
