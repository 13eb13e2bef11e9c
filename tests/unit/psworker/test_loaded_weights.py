"""Weights that a script loads into the model stay for evaluations, until the job's replace them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from psworker import Job
from psworker.client.local_client import LocalClient

EVENT = "weights_changed_by_script"
DATA = torch.arange(8.0).reshape(8, 1)


class Script:
    """A job with a training and a validation loader."""

    def __init__(self, **how: Any) -> None:
        self.job, self.model = Job(LocalClient()), nn.Linear(1, 1)
        self.optimizer = self.job.optimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.01), self.model, **how
        )
        self.batches = self.job.batches((DATA,), batch_size=2)
        self.validation = self.job.batches((DATA,), batch_size=4)

    def train(self) -> None:
        for (x,) in self.batches:
            self.step(x)

    def step(self, x: torch.Tensor = DATA) -> None:
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> set[float]:
        with torch.no_grad():
            return {self.weight for _ in self.validation}

    def evaluate_with_gradients(self) -> set[float]:
        return {self.weight for _ in self.validation}

    @property
    def weight(self) -> float:
        return float(self.model.weight.detach())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("evaluate", [Script.evaluate, Script.evaluate_with_gradients])
def test_loaded_weights_stay_for_every_evaluation(
    evaluate: Callable[[Script], set[float]], overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(overlap=overlap)
    script.train()
    best = copy.deepcopy(script.model.state_dict())
    script.train()
    last = script.weight

    script.model.load_state_dict(best)
    for _ in range(3):
        assert evaluate(script) == {float(best["weight"])}
    script.job.barrier()
    assert script.weight == float(best["weight"]) != last
    assert EVENT not in caplog.text

    script.job.pull()
    assert script.weight == last
    assert caplog.text.count(EVENT) == 1


@pytest.mark.parametrize("end", [Script.step, Script.train])
def test_each_load_that_stayed_is_logged_when_training_goes_on(
    end: Callable[[Script], None], caplog: pytest.LogCaptureFixture
) -> None:
    script = Script()
    script.train()
    for count in (1, 2, 3):
        script.model.load_state_dict({"weight": torch.ones(1, 1), "bias": torch.ones(1)})
        assert script.evaluate() == {1.0}
        end(script)
        assert script.weight < 0.9
        assert caplog.text.count(EVENT) == count


def test_a_training_pass_ends_with_the_weights_of_the_job() -> None:
    script = Script()
    for (x,) in script.batches:
        script.step(x)
        weight = script.weight
        script.model.weight.data.fill_(5.0)

    assert script.weight == weight
