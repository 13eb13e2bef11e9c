"""Rows and streams for tests of framework loops."""

from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

VALUES = torch.randn(100, 6, generator=torch.Generator().manual_seed(0))
NOISE = torch.randn(100, 1, generator=torch.Generator().manual_seed(1))
ROWS = TensorDataset(VALUES, VALUES.sum(1, keepdim=True) + NOISE)


def rows(start: int, stop: int) -> DataLoader[Any]:
    chosen = Subset(ROWS, range(start, stop))
    return DataLoader(chosen, batch_size=4)


class Stream(IterableDataset[Any]):
    def __init__(self, items: Any) -> None:
        self._items = items

    def __iter__(self) -> Any:
        return iter(self._items)
