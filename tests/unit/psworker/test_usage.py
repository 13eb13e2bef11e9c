"""The weight of a step is the number of samples whose gradients it pushes."""

from typing import Any

import torch
from torch import nn

from psworker.client.local_client import LocalClient
from psworker.core.results import PushResult
from psworker.job import Job
from psworker.optim.optimizer import ServerOptimizer

NUMBERS = torch.arange(10.0)[:, None]


class WeightRecorder(LocalClient):
    """Client that records the number of samples of each push."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[int] = []

    def exchange(self, **call: Any) -> PushResult:
        if call["gradients"] is not None:
            self.weights.append(call["samples"])
        return super().exchange(**call)


def started() -> tuple[Job, WeightRecorder, nn.Module, ServerOptimizer]:
    client, model = WeightRecorder(), nn.Linear(1, 1)
    job = Job(client)
    return job, client, model, job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)


def backward(model: nn.Module, batch: torch.Tensor) -> None:
    model(batch).mean().backward()


def test_evaluated_samples_have_no_weight() -> None:
    """torch.no_grad() is only in the loop body, where job.batches cannot detect it."""
    job, client, model, optimizer = started()

    def evaluate() -> None:
        for batch in job.batches(NUMBERS, 3):
            with torch.no_grad():
                model(batch)

    evaluate()
    for batch in job.batches(NUMBERS, 5):
        backward(model, batch)
        optimizer.step()
        optimizer.zero_grad()
        evaluate()

    assert client.weights == [5, 5]


def test_one_step_after_a_loop_has_the_weight_of_all_its_samples() -> None:
    job, client, model, optimizer = started()

    for batch in job.batches(NUMBERS, 4):
        backward(model, batch)
    optimizer.step()

    assert client.weights == [10]


def test_samples_of_a_discarded_gradient_have_no_weight() -> None:
    job, client, model, optimizer = started()

    for _ in range(2):
        for number, batch in enumerate(job.batches(NUMBERS, 4)):
            backward(model, batch)
            if number == 1:
                optimizer.step()
                optimizer.zero_grad()
        optimizer.zero_grad()

    assert client.weights == [8, 8]


def test_a_step_without_a_gradient_and_a_batch_pushes_nothing() -> None:
    """For example after a loop whose batches are all pushed. A batch alone is pushed."""
    job, client, model, optimizer = started()

    for _ in range(2):
        for batch in job.batches(NUMBERS, 5):
            backward(model, batch)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            assert len(list(job.batches(NUMBERS, 5))) == 2
        optimizer.step()
    for _ in job.batches(NUMBERS, 10):
        optimizer.step()

    assert client.weights == [5, 5, 5, 5, 10]
    assert job.stats.steps == len(client.weights)


def test_without_batches_every_step_has_one_sample() -> None:
    _, client, _, optimizer = started()

    optimizer.step()

    assert client.weights == [1]
