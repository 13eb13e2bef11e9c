"""How many samples a step weighs: those whose gradients it brings."""

from typing import Any

import torch
from torch import nn

from psworker.client.local_client import LocalClient
from psworker.core.results import PushResult
from psworker.job import Job
from psworker.optim.optimizer import ServerOptimizer

NUMBERS = torch.arange(10.0)[:, None]


class Scales(LocalClient):
    """Remembers what each push weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[int] = []

    def exchange(self, **call: Any) -> PushResult:
        if call["gradients"] is not None:
            self.weights.append(call["samples"])
        return super().exchange(**call)


def started() -> tuple[Job, Scales, nn.Module, ServerOptimizer]:
    client, model = Scales(), nn.Linear(1, 1)
    job = Job(client)
    return job, client, model, job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)


def backward(model: nn.Module, batch: torch.Tensor) -> None:
    model(batch).mean().backward()


def test_what_was_evaluated_before_a_loop_or_within_it_weighs_nothing() -> None:
    """With torch.no_grad() in the body only, where job.batches cannot see it."""
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


def test_the_gradients_of_a_whole_loop_weigh_all_its_samples() -> None:
    job, client, model, optimizer = started()

    for batch in job.batches(NUMBERS, 4):
        backward(model, batch)
    optimizer.step()

    assert client.weights == [10]


def test_a_rest_whose_gradient_is_thrown_away_weighs_nothing() -> None:
    job, client, model, optimizer = started()

    for _ in range(2):
        for number, batch in enumerate(job.batches(NUMBERS, 4)):
            backward(model, batch)
            if number == 1:
                optimizer.step()
                optimizer.zero_grad()
        optimizer.zero_grad()

    assert client.weights == [8, 8]


def test_a_step_with_neither_a_gradient_nor_a_batch_is_none() -> None:
    """As after a loop whose batches filled up all steps; a batch alone is reason enough for one."""
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


def test_without_batches_of_the_job_every_step_is_one() -> None:
    _, client, _, optimizer = started()

    optimizer.step()

    assert client.weights == [1]
