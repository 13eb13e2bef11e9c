"""Weights that are still arriving: modules wait for them, and no backward uses old ones."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pscommon.core.errors import InvalidRequestError
from psworker.job import Job
from psworker.steps import overlapped_step as overlap
from tests.support.late_client import LateClient
from tests.support.overlap_cases import (
    Flattening,
    assert_equal,
    batch,
    both,
    normed,
    perceptron,
    usual,
)

READS: list[Callable[[Any], list[Tensor]]] = [
    lambda model: list(model.parameters()),
    lambda model: list(model[1].buffers()),
    lambda model: [model[0].weight, model[1].running_mean],
    lambda model: list(dict(model.named_parameters()).values()),
]


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "piece_nbytes", lambda nbytes: 128)


def test_a_copy_made_right_after_a_step_has_the_new_weights() -> None:
    plain, (model, optimizer), _ = both(normed)
    usual(*plain, 0)
    usual(model, optimizer, 0)

    twin = copy.deepcopy(model)

    assert_equal(plain[0], twin)
    assert type(twin[0]._parameters) is type(twin[1]._buffers) is dict


def test_reading_weights_or_buffers_through_the_model_waits_for_them() -> None:
    plain, (model, optimizer), _ = both(normed)
    for number, read in enumerate(READS):
        usual(*plain, number)
        usual(model, optimizer, number)
        assert all(map(torch.equal, read(plain[0]), read(model)))


def test_a_gradient_computed_from_old_weights_is_refused() -> None:
    """Gradients of other layers, computed from current weights, may already have been sent."""
    _, (model, optimizer), client = both(perceptron)
    first, rest = model[0], model[1:]
    weight, bias = first.weight, first.bias
    for _ in range(2):
        usual(model, optimizer, 0)

    loss = rest(F.linear(batch(1)[0], weight, bias)).sum()
    with pytest.raises(
        InvalidRequestError, match=r"0\.(weight|bias) has got a gradient, but .*call job\.wait\(\)"
    ):
        loss.backward()

    assert client.version == 2


def test_after_an_explicit_wait_weights_may_be_used_without_their_module() -> None:
    plain, mine, _ = both(perceptron)

    for model, optimizer in (plain, mine):
        weight, bias = model[0].weight, model[0].bias
        for number in range(3):
            model[1:](F.linear(batch(number)[0], weight, bias)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if model is mine[0]:
                optimizer.model.wait()

    assert_equal(plain[0], mine[0])


def test_recurrent_layers_may_be_flattened_between_step_and_forward() -> None:
    plain, (model, optimizer), _ = both(Flattening)

    for number in range(3):
        usual(*plain, number)
        usual(model, optimizer, number)
        model.lstm.flatten_parameters()

    assert_equal(plain[0], model)
    assert type(copy.deepcopy(model).lstm._flat_weights) is list
    optimizer.model.strategy.close()
    assert type(model.lstm._flat_weights) is list


def test_a_layer_before_a_recurrent_one_does_not_wait_for_it() -> None:
    _, (model, optimizer), client = both(Flattening)
    for number in range(2):
        usual(model, optimizer, number)

    model.into(torch.ones(1, 4))

    assert client.open is not None
    assert client.open.missing >= sum(
        weight.nbytes for weight in list.__iter__(model.lstm._flat_weights)
    )


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("copied", [False, True])
def test_a_traced_model_with_overlap_raises_an_error_with_a_remedy(copied: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    job = Job(LateClient())
    job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, overlap=True)

    with pytest.raises(
        InvalidRequestError, match=r"torch\.jit\.script .*: script a new model that has loaded"
    ):
        torch.jit.script(copy.deepcopy(model) if copied else model)

    job.close()
    torch.jit.script(model)
    assert not any(
        hasattr(hook, "__name__") for hook in copy.deepcopy(model)._forward_pre_hooks.values()
    )


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_model_is_refused_with_a_remedy() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 2)))

    with pytest.raises(InvalidRequestError, match=r"0 was scripted or traced, .*: leave overlap"):
        Job(LateClient()).optimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model, overlap=True
        )
