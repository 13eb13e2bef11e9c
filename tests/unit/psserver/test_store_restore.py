"""Snapshots hold the whole state; any number of shards continues from them with the same bytes."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from pscommon.core.errors import SnapshotError
from pscommon.core.model_spec import ModelSpec, OptimizerSettings
from pscommon.core.partition import PartitionPlan
from psserver.parameters.store import ParameterStore
from tests.support.memory_snapshot import MemorySnapshot, contents
from tests.support.optimizer_cases import SINGLE_GROUPS
from tests.support.stores import Shards, model, noise, one_thread  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")

ROLES = ("trainable", "buffer", "frozen")
SGD: tuple[str, dict[str, Any]] = ("sgd", {"lr": 0.1})
MOMENTUM: tuple[str, dict[str, Any]] = ("sgd", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5})
ADAM: tuple[str, dict[str, Any]] = ("adam", {"lr": 1e-2})


def spec_for(name: str, group: Mapping[str, Any]) -> ModelSpec:
    tensors: list[tuple[Any, ...]] = [
        ((40, 3), "float32", 0),
        ((), "float32", 1),
        ((130,), "float32", 0),
        ((7, 7), "float64", 1),
        ((300,), "float32", 1),
        ((0,), "float32", 0),
        ((9,), "float32", "buffer"),
        ((), "int64", "buffer"),
        ((50,), "float32", "frozen"),
    ]
    return model(
        *tensors, optimizer=OptimizerSettings(name, (group, {**group, "lr": group["lr"] / 2}))
    )


def advance(job: Shards, spec: ModelSpec, start: int, stop: int) -> None:
    """Two workers; in some rounds tensors are absent, and one gets its first gradient late."""
    for step in range(start, stop):
        pushes = [
            noise(spec, 10 * step + worker, roles=("trainable", "buffer")) for worker in range(2)
        ]
        for push in pushes:
            if step < 6:
                del push["t2"]
            if step % 3 == 0:
                del push["t4"]
        groups = tuple({**group, "lr": group["lr"] * 0.95} for group in job.stores[0].groups())  # type: ignore[operator]
        job.step(*pushes, samples=[1, 2], groups=groups)


def restored(job: Shards, spec: ModelSpec, shards: int) -> Shards:
    fresh = Shards(spec, shards)
    for store in fresh.stores:
        store.restore(MemorySnapshot(job))
    return fresh


def equal(ours: Shards, theirs: Shards) -> bool:
    weights, others = ours.weights(), theirs.weights()
    return (
        all(torch.equal(weights[name], others[name]) for name in weights)
        and ours.steps() == theirs.steps()
    )


@pytest.mark.every(5)
@pytest.mark.parametrize(("name", "group"), SINGLE_GROUPS)
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 3), (3, 1), (1, 2)])
def test_a_restored_job_continues_to_the_same_bytes(
    name: str, group: dict[str, Any], before: int, after: int
) -> None:
    spec = spec_for(name, group)
    job = Shards(spec, before)
    job.begin(noise(spec, 1, roles=ROLES))
    advance(job, spec, 0, 5)
    resumed = restored(job, spec, after)
    at_once = equal(job, resumed)
    advance(job, spec, 5, 12)
    advance(resumed, spec, 5, 12)

    assert at_once
    assert equal(job, resumed)
    assert job.stores[0].groups() == resumed.stores[0].groups()


def test_a_job_can_be_restored_before_its_first_step() -> None:
    spec = spec_for(*MOMENTUM)
    job = Shards(spec, 2)
    job.begin(noise(spec, 1, roles=ROLES))
    resumed = restored(job, spec, 3)
    for each in (job, resumed):
        advance(each, spec, 0, 3)

    assert equal(job, resumed)


def test_restoring_a_used_store_replaces_its_whole_state() -> None:
    spec = spec_for(*ADAM)
    job, other = Shards(spec, 1), Shards(spec, 1)
    job.begin(noise(spec, 1, roles=ROLES))
    advance(job, spec, 0, 4)
    other.begin(noise(spec, 2, roles=ROLES))
    advance(other, spec, 0, 9)
    other.stores[0].restore(MemorySnapshot(job))
    for each in (job, other):
        advance(each, spec, 4, 8)

    assert equal(job, other)


def test_missing_weights_are_an_error() -> None:
    spec = spec_for(*SGD)
    job = Shards(spec, 1)
    job.begin(noise(spec, 1, roles=ROLES))
    snapshot = MemorySnapshot(job)
    snapshot.forget("weight")

    with pytest.raises(SnapshotError, match="lacks weights"):
        ParameterStore(PartitionPlan(spec, 2), 0).restore(snapshot)


def test_an_export_is_a_copy_whose_memory_is_reused() -> None:
    spec = spec_for(*ADAM)
    job = Shards(spec, 1)
    job.begin(noise(spec, 1, roles=ROLES))
    advance(job, spec, 0, 2)
    first = job.stores[0].export()
    places = {key: tensor.data_ptr() for key, tensor in first.items()}
    snapshot = contents(first)
    advance(job, spec, 2, 4)
    unchanged = contents(first) == snapshot
    second = job.stores[0].export(first)

    assert unchanged
    assert {key.partition("@")[0] for key in second} == {"weight", "exp_avg", "exp_avg_sq"}
    assert {key: tensor.data_ptr() for key, tensor in second.items()} == places
    assert contents(second) != snapshot
