"""Hyper-parameters for which a formula raises an exception are refused, in registrations and
pushes.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pscommon.core.errors import InvalidRequestError
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from pscommon.optim import KINDS
from pscommon.optim.specs import check_numbers, groups_of_push, validate
from tests.support.stores import begun

TENSORS = (TensorSpec("w", (3,), "float16"), TensorSpec("v", (3,), "float32", group=1))


def large_values() -> Iterator[tuple[str, str, Any]]:
    for name, kind in KINDS.items():
        for key, default in kind.defaults.items():
            for large in (1e5, 1e39, 1e300):
                if isinstance(default, tuple) and key != "betas":
                    yield name, key, (default[0], large)
                elif isinstance(default, float):
                    yield name, key, large


@pytest.mark.parametrize(("name", "key", "value"), [*large_values()])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_exactly_the_numbers_that_raise_on_a_server_are_refused(
    name: str, key: str, value: Any, dtype: str
) -> None:
    tensors = (TensorSpec("w", (3, 5), dtype),)
    try:
        spec = validate(OptimizerSettings(name, ({key: value},)))
    except InvalidRequestError:  # the value is out of range
        return
    job = begun(ModelSpec(tensors, spec))
    try:
        for step in range(3):
            job.step({"w": torch.full((3, 5), 0.5 + step).to(getattr(torch, dtype))})
    except RuntimeError:
        with pytest.raises(
            InvalidRequestError, match=f"{name}, group 0: a number is too large for {dtype} weights"
        ):
            check_numbers(spec, tensors)
    else:
        check_numbers(spec, tensors)


def test_a_push_with_numbers_out_of_range_is_refused() -> None:
    """Betas of NAdam, for example, with which all servers would divide by zero."""
    like = validate(OptimizerSettings("nadam", ({}, {})))
    with pytest.raises(InvalidRequestError, match="nadam, group 1: betas are"):
        groups_of_push('[{}, {"betas": [1.0, 0.9]}]', like, TENSORS)
    with pytest.raises(
        InvalidRequestError, match="nadam, group 0: a number is too large for float16"
    ):
        groups_of_push('[{"weight_decay": 1e5}, {}]', like, TENSORS)

    assert groups_of_push('[{}, {"weight_decay": 1e5}]', like, TENSORS)[1]["weight_decay"] == 1e5


def test_a_push_may_have_values_that_torch_schedulers_produce() -> None:
    like = validate(OptimizerSettings("sgd", ({"momentum": 0.9, "nesterov": True}, {})))
    one, _ = groups_of_push('[{"lr": -1e-20, "momentum": 0.0}, {}]', like, TENSORS)

    assert (one["lr"], one["momentum"]) == (-1e-20, 0.0)
