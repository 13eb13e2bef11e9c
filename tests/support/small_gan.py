"""A small GAN: two networks, and two optimizers that step in turn for each batch."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from psworker import Job

SAMPLES, BATCH = 48, 8
Networks = Mapping[str, nn.Module]
Optimizers = Mapping[str, torch.optim.Optimizer]
Step = Callable[[Networks, Optimizers, Tensor, Tensor], None]


def networks(has_buffers: bool = False) -> Networks:
    """Return discriminator "d" and generator "g" with fixed initial weights.

    has_buffers: with BatchNorm, whose result depends on the whole batch.
    """
    norm: Callable[[int], nn.Module] = nn.BatchNorm1d if has_buffers else nn.Identity
    made = {
        "d": nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)),
        "g": nn.Sequential(nn.Linear(4, 16), norm(16), nn.ReLU(), nn.Linear(16, 2)),
    }
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for network in made.values():
            for parameter in network.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
    return made


def optimizers(nets: Networks) -> Optimizers:
    """Return optimizers of two classes; that of "d" has two parameter groups."""
    first, _, last = nets["d"]
    return {
        "d": torch.optim.Adam(
            [{"params": first.parameters()}, {"params": last.parameters(), "lr": 0.01}],
            lr=0.02,
            betas=(0.5, 0.99),
        ),
        "g": torch.optim.SGD(nets["g"].parameters(), lr=0.1, momentum=0.9),
    }


def data() -> TensorDataset:
    """Return real points with the noise for a generated point each."""
    generator = torch.Generator().manual_seed(4)
    points = torch.randn(SAMPLES, 2, generator=generator) * 0.3 + 1.0
    return TensorDataset(points, torch.randn(SAMPLES, 4, generator=generator))


def step_discriminator(nets: Networks, made: Optimizers, real: Tensor, noise: Tensor) -> None:
    made["d"].zero_grad()
    backward_discriminator(nets, real, noise)
    made["d"].step()


def step_generator(nets: Networks, made: Optimizers, real: Tensor, noise: Tensor) -> None:
    """Make a step of "g"; its backward gives the parameters of "d" gradients, too."""
    made["g"].zero_grad()
    backward_generator(nets, noise)
    made["g"].step()


def backward_discriminator(nets: Networks, real: Tensor, noise: Tensor) -> None:
    real_loss = loss(nets["d"](real), 1.0)
    (real_loss + loss(nets["d"](nets["g"](noise).detach()), 0.0)).backward()


def backward_generator(nets: Networks, noise: Tensor) -> None:
    loss(nets["d"](nets["g"](noise)), 1.0).backward()


def loss(scores: Tensor, target: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, target))


def train_step(nets: Networks, made: Optimizers, real: Tensor, noise: Tensor) -> None:
    step_discriminator(nets, made, real, noise)
    step_generator(nets, made, real, noise)


def handed_over(job: Job, nets: Networks, **options: Any) -> Optimizers:
    """Give both optimizers to the job; return those that it returns."""
    return {
        name: job.optimizer(optimizer, nets[name], name=name, **options)
        for name, optimizer in optimizers(nets).items()
    }


def state_of(nets: Networks) -> dict[str, Tensor]:
    """Return copies of all parameters and buffers, by their names in the job."""
    return {
        f"{name}.{key}": value.detach().clone()
        for name, network in nets.items()
        for key, value in network.state_dict().items()
    }
