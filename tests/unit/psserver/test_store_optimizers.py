"""Several optimizers over one model: each updates its own tensors as if it were alone."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from pscommon.core.errors import InvalidRequestError
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from pscommon.optim.specs import groups_to_json
from tests.support.memory_snapshot import MemorySnapshot, contents
from tests.support.optimizer_cases import SINGLE_GROUPS
from tests.support.stores import Shards, noise, one_thread  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")

ROLES = ("trainable", "buffer", "frozen")
FIRST = ModelSpec(
    (
        TensorSpec("a.w", (40, 3), "float32"),
        TensorSpec("a.b", (17,), "float32", group=1),
        TensorSpec("a.mean", (9,), "float32", "buffer"),
    ),
    OptimizerSettings("adam", ({"lr": 0.1}, {"lr": 0.2, "weight_decay": 0.1})),
)


def second_of(name: str, group: Mapping[str, Any]) -> ModelSpec:
    return ModelSpec(
        (
            TensorSpec("b.w", (130,), "float32"),
            TensorSpec("b.half", (33,), "float64"),
            TensorSpec("b.fixed", (5,), "float32", "frozen"),
        ),
        OptimizerSettings(name, (group,)),
    )


def joined(second: ModelSpec) -> ModelSpec:
    """Return one model with an optimizer for each of FIRST and `second`."""
    moved = tuple(
        TensorSpec(t.name, t.shape, t.dtype, t.role, 2 if t.role == "trainable" else 0)
        for t in second.tensors
    )
    return ModelSpec((*FIRST.tensors, *moved), {"a": FIRST.optimizer, "b": second.optimizer})


def make_step(job: Shards, spec: ModelSpec, step: int, name: str, optimizer: str) -> None:
    """Make a step of the model `name`, "b" every second time; one of the steps lacks a gradient.

    optimizer: its name in the job.
    """
    if name == "b" and step % 2:
        return
    push = noise(spec, 10 * step + ord(name), roles=("trainable", "buffer"))
    if step == 3:
        del push[f"{name}.w"]
    groups = [{**group, "lr": 0.1 / (step + 1)} for group in spec.optimizer.groups]
    parsed = job.stores[0].parse_groups(groups_to_json(groups), optimizer)
    job.step(push, groups=parsed.values, optimizer=optimizer)


def train(job: Shards, parts: Mapping[str, ModelSpec], start: int, stop: int) -> None:
    """Let both optimizers step in turn."""
    for step in range(start, stop):
        for name, spec in parts.items():
            make_step(job, spec, step, name, name)


def weights_of_both(parts: Mapping[str, ModelSpec], steps: int) -> dict[str, Tensor]:
    """Return the weights if each model is trained alone."""
    found: dict[str, Tensor] = {}
    for name, spec in parts.items():
        job = Shards(spec, 1)
        job.begin(noise(spec, 1, roles=ROLES))
        for step in range(steps):
            make_step(job, spec, step, name, "")
        found |= job.weights()
    return found


@pytest.mark.every(4)
@pytest.mark.parametrize(("name", "group"), SINGLE_GROUPS)
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 3), (3, 1)])
def test_each_optimizer_steps_as_if_it_were_alone(
    name: str, group: dict[str, Any], before: int, after: int
) -> None:
    """Also after a snapshot in between that another number of shards loads."""
    second = second_of(name, group)
    parts, spec = {"a": FIRST, "b": second}, joined(second)
    job = Shards(spec, before)
    job.begin(noise(FIRST, 1, roles=ROLES) | noise(second, 1, roles=ROLES))
    train(job, parts, 0, 4)
    resumed = Shards(spec, after)
    for store in resumed.stores:
        store.restore(MemorySnapshot(job))
    assert groups_to_json(resumed.stores[0].groups()) == groups_to_json(job.stores[0].groups())
    for each in (job, resumed):
        train(each, parts, 4, 8)

    expected = weights_of_both(parts, 8)
    for each in (job, resumed):
        found = each.weights()
        # a push has all buffers, and those of "b" have no values for that of "a"
        assert {k for k in expected if not torch.equal(found[k], expected[k])} <= {"a.mean"}
    assert job.steps() == resumed.steps()
    if before == after:
        assert contents(job.stores[0].export()) == contents(resumed.stores[0].export())


def test_a_push_must_be_a_step_of_one_optimizer() -> None:
    second = second_of("sgd", {"lr": 0.1})
    job = Shards(joined(second), 2)
    job.begin(noise(FIRST, 1, roles=ROLES) | noise(second, 1, roles=ROLES))
    push = noise(FIRST, 2, roles=("trainable", "buffer"))

    with pytest.raises(InvalidRequestError, match="no optimizer 'c', but 'a', 'b'"):
        job.step(push, optimizer="c")
    with pytest.raises(
        InvalidRequestError,
        match=r"a step of optimizer b has a gradient of a\.w, which belongs to optimizer a",
    ):
        job.step(push, optimizer="b")
    with pytest.raises(InvalidRequestError, match="adam has 1 parameter groups, but 2 in the job"):
        job.stores[0].parse_groups('[{"lr": 0.1}]', "a")
    assert job.stores[0].parse_groups('[{"lr": 0.25}]', "b").values[0]["lr"] == 0.25


def test_tensors_of_the_other_optimizer_count_as_unchanged() -> None:
    """A worker does not receive them again."""
    second = second_of("sgd", {"lr": 0.1})
    job = Shards(joined(second), 1)
    job.begin(noise(FIRST, 1, roles=ROLES) | noise(second, 1, roles=ROLES))
    job.step(noise(FIRST, 2, roles=("trainable", "buffer")), optimizer="a")

    assert job.stores[0].find_unchanged(1) == {3, 4}
