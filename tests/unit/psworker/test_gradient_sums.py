"""A worker's share of the gradients under policy allreduce, in the flat buffer."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from pscommon.core.errors import NonFiniteError
from pscommon.core.partition import PartitionPlan
from pscommon.optim.specs import validate_model
from pscommon.parameters.partition import ShardPartition
from psworker.model.adapter import ModelAdapter
from psworker.model.model_spec import OptimizerMembers
from psworker.steps.gradient_sums import ADDED_ELEMENTS, BLOCK_ELEMENTS, GradientSums

LARGE = 2 * BLOCK_ELEMENTS + 10
"""Elements of a tensor that is scaled in several pieces."""


class Sums:
    """The sums of a model of parameters with these shapes, and its gradients."""

    def __init__(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32) -> None:
        parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
        self.model = nn.ParameterList(parameters)
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.adapter = ModelAdapter(self.model, {"": OptimizerMembers.of(sgd)})
        plan = PartitionPlan(validate_model(self.adapter.spec), 1)
        memory = [memoryview(bytearray(plan.nbytes)) for _ in range(2)]
        self.adapter.attach(plan, (memory[0], memory[1]))
        self.partition = ShardPartition(plan, 0)
        flat = torch.zeros(self.partition.step_nbytes, dtype=torch.uint8)
        self.sums = GradientSums(self.partition, self.adapter, flat)

    def set_gradients(self, **special: Tensor | None) -> None:
        for index, parameter in enumerate(self.model.parameters()):
            generator = torch.Generator().manual_seed(index)
            values = torch.rand(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = special.get(f"g{index}", values)

    def fill(self, share: float) -> list[Tensor]:
        return list(self.sums.fill(self.adapter.grads(), share))

    def results(self) -> dict[str, Tensor]:
        group = self.adapter.trainable
        return {
            name: self.partition.view(self.sums.buffers, tensor.dtype, *extent).view(tensor.shape)
            for name, tensor, extent in zip(group.names, group.tensors, group.extents, strict=True)
        }

    def assert_scaled(self, share: float) -> None:
        for (name, found), parameter in zip(
            sorted(self.results().items()), self.model.parameters(), strict=True
        ):
            grad = parameter.grad
            expected = torch.zeros_like(found) if grad is None else grad * share
            assert torch.equal(found, expected), name


@pytest.mark.parametrize("shapes", [[(3, 5), (7,)], [(LARGE,), (3,), (2, 2)], [(1,)]], ids=str)
def test_each_gradient_is_scaled(shapes: Sequence[Sequence[int]]) -> None:
    made = Sums(shapes)
    made.set_gradients()
    made.fill(0.25)
    made.assert_scaled(0.25)

    made.set_gradients(g0=None)
    made.fill(0.5)
    made.assert_scaled(0.5)


@pytest.mark.parametrize("shape", [(30, 20), (2, LARGE)], ids=str)
def test_a_transposed_gradient_is_scaled(shape: tuple[int, int]) -> None:
    made = Sums([shape])
    made.set_gradients(g0=torch.rand(shape[::-1]).t())
    made.fill(0.5)
    made.assert_scaled(0.5)


def test_the_cuts_depend_on_the_model_only() -> None:
    """gloo pairs the operations of the workers in their order."""
    made = Sums([(ADDED_ELEMENTS + LARGE,), (5,), (ADDED_ELEMENTS,), (7,)])
    made.set_gradients()
    all_there = made.fill(1.0)
    made.set_gradients(g0=None, g3=None)
    some_absent = made.fill(1.0)

    assert [len(part) for part in all_there] == [len(part) for part in some_absent]
    assert max(len(part) for part in all_there) <= ADDED_ELEMENTS
    covered = sum(len(part) for part in all_there)
    assert covered >= sum(parameter.numel() for parameter in made.model.parameters())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, LARGE - 1])
def test_nan_and_inf_are_found(value: float, place: int) -> None:
    made = Sums([(4,), (LARGE,)])
    bad = torch.zeros(LARGE)
    bad[place] = value
    made.set_gradients(g1=bad)

    with pytest.raises(NonFiniteError, match="the gradient of 1 has NaN or Inf"):
        made.fill(0.5)


def test_a_sum_that_overflows_is_no_inf() -> None:
    made = Sums([(4,)])
    made.set_gradients(g0=torch.full((4,), 3e38))
    made.fill(1.0)
    made.assert_scaled(1.0)


def test_half_precision_is_added_up_in_float32_and_rounded_once() -> None:
    made = Sums([(4,)], torch.bfloat16)
    made.set_gradients(g0=torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16))
    (added,) = made.fill(1.0 / 3)
    assert added.dtype is torch.float32

    added += 2 * added
    made.sums.finish(None)

    (found,) = made.results().values()
    assert found.tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("size", [4, LARGE])
@pytest.mark.parametrize(("half", "value"), [("bfloat16", 1.0), ("float16", 6e-8)])
def test_a_share_of_half_precision_is_not_rounded(size: int, half: str, value: float) -> None:
    """The largest of it would be 0.33398 in bfloat16, and 0 in float16."""
    dtype = getattr(torch, half)
    made = Sums([(size,)], dtype)
    gradient = torch.full((size,), value, dtype=dtype)
    made.set_gradients(g0=gradient)
    added = made.fill(1.0 / 3)

    for part in added:
        assert torch.equal(part, (gradient[0].float() * (1.0 / 3)).expand_as(part))


def test_the_norm_is_clipped_as_by_torch() -> None:
    made = Sums([(3, 5), (7,)])
    made.set_gradients()
    made.fill(1.0)
    made.sums.finish(0.5)

    nn.utils.clip_grad_norm_(made.model.parameters(), 0.5)
    for found, parameter in zip(made.results().values(), made.model.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(found, parameter.grad)
