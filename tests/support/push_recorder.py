"""Clients without servers that record pushes of several optimizers."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pscommon.core.errors import FencedError
from pscommon.core.log_entries import BatchKey
from psworker import Job
from psworker.client.local_client import LocalClient
from psworker.core.results import Lease, PushResult

SGD = torch.optim.SGD


class PushRecorder(LocalClient):
    """Records name, samples, batches and absent tensors of each push; may fail one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.pushed: list[tuple[str, int, int]] = []
        self.absent: list[set[str]] = []
        self.returned: list[BatchKey] = []
        self.groups: list[str] = []
        self.fenced_push = 0

    def exchange(self, **call: Any) -> PushResult:
        if call["gradients"] is not None:
            self.pushed.append((call.get("optimizer", ""), call["samples"], len(call["batches"])))
            self.absent.append({self.plan.spec.tensors[i].name for i in call["absent"]})
            self.groups.append(call["groups_json"])
            if len(self.pushed) == self.fenced_push:
                raise FencedError("planted")
        return super().exchange(**call)


class TwoPerUpdate(PushRecorder):
    """Deals batches of which two make an update (--global-batch)."""

    def next_batches(self, *arguments: Any, **options: Any) -> Lease:
        lease = super().next_batches(*arguments, **options)
        return replace(lease, following=tuple(1 - number % 2 for number in lease.numbers))


def two(job: Job, **options: Any) -> tuple[nn.Module, nn.Module]:
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    job.optimizer(SGD(first.parameters(), lr=0.1), first, name="a", **options)
    job.optimizer(SGD(second.parameters(), lr=0.1), second, name="b", **options)
    return first, second
