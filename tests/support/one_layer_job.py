"""A job without servers that trains one linear layer by SGD."""

from typing import Any

import torch
from torch import nn

from psworker.client.local_client import LocalClient
from psworker.core.results import PushResult, StepProgress
from psworker.job import Job
from psworker.optim.optimizer import ServerOptimizer


def make_model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def start_job(
    client: LocalClient | None = None, **hyper: Any
) -> tuple[Job, nn.Linear, ServerOptimizer]:
    job, net = Job(client or LocalClient()), make_model()
    settings = {"lr": 0.1, "momentum": 0.9} | hyper
    return job, net, job.optimizer(torch.optim.SGD(net.parameters(), **settings), net)


def set_gradients(net: nn.Module, value: float = 1.0) -> None:
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, value)


class RecordingClient(LocalClient):
    """Client that records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[dict[str, Any]] = []
        self.reasons: list[str] = []
        self.phases: list[str] = []

    def exchange(self, **call: Any) -> PushResult:
        self.sent.append(call)
        return super().exchange(**call)

    def show_progress(self, progress: StepProgress) -> None:
        self.phases.append(progress.phase)

    def leave(self, reason: str = "") -> None:
        self.reasons.append(reason)
