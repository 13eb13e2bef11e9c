"""Networks that workers really train, ours and DDP's alike: the same layers, data and loss."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

SAMPLE_COUNT = 4096
PIXEL_COUNT, CLASS_COUNT = 28 * 28, 10


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(),
        *(nn.Linear(PIXEL_COUNT, 2048), nn.ReLU()),
        *(nn.Linear(2048, 1792), nn.ReLU()),
        nn.Linear(1792, CLASS_COUNT),
    )


def cnn() -> nn.Sequential:
    """That of torch's MNIST example, without dropout."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(9216, 128), nn.ReLU()),
        nn.Linear(128, CLASS_COUNT),
    )


def small() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(PIXEL_COUNT, 6), nn.ReLU(), nn.Linear(6, CLASS_COUNT)
    )


NETWORKS: dict[str, Callable[[], nn.Sequential]] = {"mlp": mlp, "cnn": cnn, "small": small}


def network(name: str) -> nn.Sequential:
    """Return the network of that name, with the same weights in every process."""
    torch.manual_seed(0)
    return NETWORKS[name]()


def dataset() -> TensorDataset:
    """Return random pictures with random labels."""
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(SAMPLE_COUNT, 1, 28, 28, generator=generator)
    return TensorDataset(pictures, torch.randint(CLASS_COUNT, (SAMPLE_COUNT,), generator=generator))


def differentiate(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """Leave the gradients of a batch in the model."""
    pictures, labels = batch
    F.cross_entropy(model(pictures), labels).backward()  # type: ignore[no-untyped-call]
