"""A small classification task for train_distributed."""

import os
from pathlib import Path

import torch
from torch import nn

INPUTS = torch.randn(120, 6, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS.sum(1) > 0).long()
DATA = (INPUTS, LABELS)


class Net(nn.Sequential):
    """Model with fixed initial weights."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 2)
        )
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def make_adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02)  # type: ignore[arg-type]


def child_pids() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


class FailingDataset(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Endless data; the `at`-th requested sample cannot be read, the others can."""

    def __init__(self, at: int) -> None:
        self.asked = 0
        self._at = at

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked += 1
        if self.asked == self._at:
            raise FileNotFoundError("sample.png")
        return INPUTS[index % 120], LABELS[index % 120]
