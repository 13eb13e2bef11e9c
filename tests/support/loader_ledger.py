"""A ledger of batches that replaces the servers of a loader."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from pscommon.core.data_stream import Spec
from pscommon.core.log_entries import BatchKey
from psworker.client.local_client import LocalClient
from psworker.core.results import Lease, PushResult


class Ledger(LocalClient):
    """A job of one worker that records loops, pushes and returned batches."""

    def __init__(self) -> None:
        super().__init__()
        self.loops: list[Spec] = []
        self.pushed: list[tuple[BatchKey, ...]] = []
        self.returned: list[BatchKey] = []
        self.dropped: list[BatchKey] = []

    def next_batches(
        self, loop: Spec, count: int = 1, idle: bool = False, first_open: int | None = None
    ) -> Lease:
        if loop not in self.loops:
            self.loops.append(loop)
        return super().next_batches(loop, count, idle, first_open)

    def return_batches(self, batches: Any, used: bool = False) -> None:
        if used:
            self.dropped += batches
        else:
            self.returned += batches
        super().return_batches(batches, used)

    def exchange(self, **call: Any) -> PushResult:
        if call["gradients"] is not None:
            self.pushed.append(tuple(call["batches"]))
        return super().exchange(**call)


class Count(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Tensor]:
        return map(torch.tensor, range(5))
