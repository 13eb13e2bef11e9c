"""Models with a momentum encoder, trained by workers of a job and by DistributedDataParallel."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.support.torch_scripts import noise

STEPS, WORKERS, KEYS = 7, 2, 24


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a layer with the same weights in every thread and process."""
    layer = nn.Linear(inputs, outputs, dtype=torch.float64)
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            parameter.copy_(noise(*parameter.shape, seed=number) * 0.4)
    return layer


class Moco(nn.Module):
    """Contrast with a queue of keys. The encoder of the keys follows in forward."""

    treatments: ClassVar = {"k.*": "first"}

    def __init__(self) -> None:
        super().__init__()
        self.q = linear(6, 4)
        self.k = copy.deepcopy(self.q).requires_grad_(False)
        self.register_buffer("queue", F.normalize(noise(4, KEYS, seed=2), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        query = F.normalize(self.q(x), dim=1)
        with torch.no_grad():
            follow(self.k, self.q)
            key = F.normalize(self.k(x * 1.1), dim=1)
        others = query @ self.queue.clone()
        logits = torch.cat([(query * key).sum(1, keepdim=True), others], 1) / 0.2
        place = int(self.place)
        self.queue[:, place : place + len(key)] = key.T
        self.place[0] = (place + len(key)) % KEYS
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

    def end_step(self) -> None:
        """Do nothing: forward moves the momentum encoder."""


class Byol(nn.Module):
    """A teacher that follows the student after each step."""

    treatments: ClassVar = {"teacher.*": "first"}

    def __init__(self) -> None:
        super().__init__()
        self.student, self.predictor = linear(6, 4), linear(4, 4)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        made = self.student(x)
        target = self.teacher(x)
        loss: Tensor = (
            made.square().mean() - F.cosine_similarity(self.predictor(made), target).mean()
        )
        return loss

    def end_step(self) -> None:
        """Move the teacher."""
        follow(self.teacher, self.student)


@torch.no_grad()
def follow(teacher: nn.Module, student: nn.Module) -> None:
    """Move each parameter of the teacher a tenth of the way to the student's."""
    for mine, other in zip(teacher.parameters(), student.parameters(), strict=True):
        mine.lerp_(other, 0.1)


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum over the parameters that require a gradient."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=0.3, momentum=0.5)


def train(model: Any, call: nn.Module, optimizer: Any, rank: int, steps: int = STEPS) -> None:
    """Make steps on batches of this worker. call: The module to call in place of the model."""
    for number in range(steps):
        call(noise(8, 6, seed=100 + 10 * number + rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.end_step()


def train_with_gloo(rank: int, kinds: Sequence[type[Any]], folder: Path) -> None:
    """Train one rank of DistributedDataParallel; rank 0 writes the state of each kind of model to
    `folder`.
    """
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORKERS
    )
    for kind in kinds:
        model = kind()
        train(model, DistributedDataParallel(model), make_sgd(model), rank)
        if rank == 0:
            torch.save(model.state_dict(), folder / kind.__name__)
    dist.destroy_process_group()
