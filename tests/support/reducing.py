"""A worker of a test under policy allreduce."""

import torch
from torch import Tensor, nn

from psworker.core.results import CollectiveCall
from psworker.optim.optimizer import ServerOptimizer
from psworker.steps.reduced_step import ReducedStep
from tests.support.workers import joined

BARRIER = CollectiveCall("barrier")


class Net(nn.Module):
    """A weight, and one buffer of each kind: averaged, an integer, a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mask", torch.tensor([0.0, -float("inf")]))

    count: Tensor
    mean: Tensor


class Worker:
    """A worker of a test, with its model and optimizer."""

    def __init__(self, address: str, rank: int) -> None:
        self.job, self.model = joined(address, rank), Net()
        adam = torch.optim.Adam(self.model.parameters(), lr=0.5)
        self.optimizer: ServerOptimizer = self.job.optimizer(adam, self.model)
        self.job.pull()

    @property
    def strategy(self) -> ReducedStep:
        assert self.optimizer.model is not None
        assert isinstance(self.optimizer.model.strategy, ReducedStep)
        return self.optimizer.model.strategy

    def backward(self, gradient: float = 1.0) -> None:
        self.model.weight.grad = gradient * torch.tensor([1.0, 2.0, 3.0])

    def step(self, gradient: float = 1.0) -> str:
        self.backward(gradient)
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert self.optimizer.result is not None
        return self.optimizer.result.status

    def steps(self, count: int) -> None:
        assert [self.step() for _ in range(count)] == ["applied"] * count

    def weights(self) -> list[float]:
        return self.model.weight.tolist()
