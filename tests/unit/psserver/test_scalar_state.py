"""Per-tensor scalars of an optimizer on shards, in snapshots, in reshards and on standbys."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscommon.core.errors import SnapshotError
from pscommon.core.model_spec import ModelSpec, OptimizerSettings
from pscommon.core.partition import PartitionPlan
from pscommon.optim import KINDS
from pscommon.optim.specs import groups_to_json, scalars_from_json, scalars_to_json, validate
from pscommon.snapshot import Manifest, SnapshotDirectory, SnapshotReader
from pscommon.system.thread_team import ALONE
from psserver.durability.shard_state import ShardState
from psserver.durability.state_records import (
    ReceivedState,
    StateRecord,
    StateRecordKind,
    checksum,
    shard_records,
)
from psserver.parameters.frozen_shard import FrozenShard
from psserver.parameters.store import ParameterStore
from psserver.peers.resharding import ReshardReader, needed_by
from tests.support.optimizer_cases import CASES, WITH_SCALARS
from tests.support.stores import Shards, begun, model, noise, one_thread, plain_of  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")

NADAM: tuple[str, dict[str, Any]] = ("nadam", {"lr": 1e-2, "momentum_decay": 0.1})
STATE_FROM_LR = ("rprop", {"lr": 1e-2})


def cut_model(name: str, group: Mapping[str, Any]) -> ModelSpec:
    """With 2 or 3 shards the large tensors are split over several of them."""
    return model(
        ((700,), "float32", 0),
        ((13, 3), "float64", 1),
        ((5,), "float32", 0),
        ((900,), "float64", 1),
        ((7,), "int64", "buffer"),
        ((9,), "float32", "frozen"),
        optimizer=OptimizerSettings(name, (group, {**group, "lr": group["lr"] / 2})),
    )


def changed(groups: Any, step: int) -> Any:
    """Change learning rate and momentum in each step, so that scalars depend on the history."""
    factor = 0.5 + 0.1 * (step % 5)
    betas = {"betas": (factor / 2, 0.9)}
    return tuple(
        {**group, "lr": group["lr"] * factor, **(betas if "betas" in group else {})}
        for group in groups
    )


def advance(job: Shards, start: int, stop: int) -> None:
    """Tensor t2 gets its first gradient late, t3 at every other step."""
    spec = job.plan.spec
    first = validate(spec.optimizer).groups
    for step in range(start, stop):
        push = noise(spec, 10 + step, roles=("trainable", "buffer"))
        if step < 4:
            del push["t2"]
        if step % 2:
            del push["t3"]
        job.step(push, groups=changed(first, step))


def trained(name: str, group: Mapping[str, Any], shards: int, steps: int = 6) -> Shards:
    spec = cut_model(name, group)
    job = begun(spec, shards)
    advance(job, 0, steps)
    return job


def check_same_training(job: Shards, other: Shards) -> bool:
    for each in (job, other):
        advance(each, 6, 10)
    ours, theirs = job.weights(), other.weights()
    return (
        all(torch.equal(ours[name], theirs[name]) for name in ours) and job.steps() == other.steps()
    )


def saved(job: Shards, folder: Path) -> tuple[SnapshotDirectory, Manifest]:
    snapshots = SnapshotDirectory(folder)
    parts = [
        snapshots.write_part(
            6,
            shard,
            len(job.stores),
            store.export(),
            store.steps(),
            groups_to_json(store.groups()),
            scalars_to_json(store.scalars()),
        )
        for shard, store in enumerate(job.stores)
    ]
    manifest = Manifest(
        job="job",
        version=6,
        index=6,
        shards=len(parts),
        created="2026-11-23T00:00:00+00:00",
        model=job.plan.spec,
        parts=tuple(parts),
    )
    snapshots.commit(manifest)
    return snapshots, manifest


def test_scalars_are_equal_on_all_shards_of_a_tensor_and_differ_between_tensors() -> None:
    job = trained(*NADAM, shards=3)
    scalars = [store.scalars()["mu_product"] for store in job.stores]
    merged = {index: {part[index] for part in scalars if index in part} for index in range(4)}

    assert sum(3 in part for part in scalars) == 3
    assert all(len(values) == 1 for values in merged.values())
    assert len(set().union(*merged.values())) == 3  # t0 and t1 have stepped alike


@pytest.mark.parametrize(("name", "group"), WITH_SCALARS)
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_neighbours_with_equal_step_counts_keep_separate_scalars(
    name: str, group: dict[str, Any], shards: int
) -> None:
    """Each has made one step, under another schedule, when both step together."""
    spec = model(
        ((300,), "float64"), ((300,), "float64"), optimizer=OptimizerSettings(name, (group,))
    )
    job = begun(spec, shards)
    plain = plain_of(spec, job.weights())
    first = validate(spec.optimizer).groups
    for step, present in enumerate((["t0"], ["t1"], ["t0", "t1"], ["t0", "t1"])):
        push = {key: value for key, value in noise(spec, step).items() if key in present}
        plain.step(push, groups=changed(first, step))
        job.step(push, groups=changed(first, step))

    for tensor, weight in job.weights().items():
        torch.testing.assert_close(weight, plain.weights[tensor], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "group"), [*WITH_SCALARS, STATE_FROM_LR])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 3), (2, 3), (3, 1), (3, 2), (2, 40)])
def test_a_snapshot_on_disk_restores_to_any_number_of_shards(
    tmp_path: Path, name: str, group: dict[str, Any], before: int, after: int
) -> None:
    job = trained(name, group, before)
    snapshots, manifest = saved(job, tmp_path)
    other = Shards(job.plan.spec, after)
    for shard, store in enumerate(other.stores):
        store.restore(SnapshotReader(snapshots, manifest, needed_by(other.plan, shard)))

    assert check_same_training(job, other)


@pytest.mark.parametrize(("name", "group"), [*WITH_SCALARS, STATE_FROM_LR])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 2), (3, 1)])
def test_a_reshard_transfers_scalars(
    name: str, group: dict[str, Any], before: int, after: int
) -> None:
    job, unchanged = trained(name, group, before), trained(name, group, before)
    frozen = [FrozenShard(1, 7, before, store) for store in job.stores]
    other = Shards(job.plan.spec, after)
    for shard, store in enumerate(other.stores):
        store.restore(ReshardReader(job.plan, frozen, needed_by(other.plan, shard)))

    assert check_same_training(unchanged, other)


@pytest.mark.parametrize(("name", "group"), [*WITH_SCALARS, STATE_FROM_LR])
def test_a_standby_receives_scalars(name: str, group: dict[str, Any]) -> None:
    job = trained(name, group, 2)
    other = Shards(job.plan.spec, 2)
    for store, standby in zip(job.stores, other.stores, strict=True):
        received = ReceivedState()
        state = ShardState(0, 2, ALONE)
        state.install_model(job.plan.spec, store)
        for record in shard_records(state):
            if (
                record.kind in (StateRecordKind.NUMBERS, StateRecordKind.OPTIMIZER)
                and record.source.name == "LINE"
            ):
                received.add(joined(record))
        standby.restore(received)
    sums = [
        (checksum(store), checksum(standby))
        for store, standby in zip(job.stores, other.stores, strict=True)
    ]

    assert all(one == two for one, two in sums)
    assert check_same_training(job, other)


def joined(record: StateRecord) -> StateRecord:
    """Return the bytes of the records as one, as they arrive at the standby."""
    return record._replace(payload=[b"".join(bytes(part) for part in record.payload)])


def test_the_checksum_covers_scalars() -> None:
    one, two = trained(*NADAM, shards=1), trained(*NADAM, shards=1)
    store = two.stores[0]
    store._optimizers[""]._scalars["mu_product"] *= 0.5

    assert checksum(one.stores[0]) != checksum(store)


def metadata(folder: Path) -> Iterator[dict[str, str]]:
    for path in sorted(folder.glob("snapshots/*/shard-*")):
        data = path.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        yield header["__metadata__"]


def test_only_an_optimizer_with_scalars_writes_them(tmp_path: Path) -> None:
    for name, group in (*WITH_SCALARS, ("adam", {"lr": 1e-2}), STATE_FROM_LR):
        saved(trained(name, group, 2), tmp_path / name)

    assert all(
        each.keys() == {"steps", "groups"}
        for name in ("adam", "rprop")
        for each in metadata(tmp_path / name)
    )
    for name, _ in WITH_SCALARS:
        scalars = {each.name for each in KINDS[name].scalars}
        for each in metadata(tmp_path / name):
            assert json.loads(each["scalars"]).keys() == scalars
            assert all(
                json.loads(each["scalars"])[scalar].keys() == json.loads(each["steps"]).keys()
                for scalar in scalars
            )


def test_a_snapshot_without_the_scalars_of_a_tensor_is_refused_by_name(tmp_path: Path) -> None:
    job = trained(*NADAM, shards=1)
    store = job.stores[0]
    snapshots = SnapshotDirectory(tmp_path)
    part = snapshots.write_part(
        6, 0, 1, store.export(), store.steps(), groups_to_json(store.groups())
    )
    manifest = Manifest(
        job="job", version=6, index=6, shards=1, created="", model=job.plan.spec, parts=(part,)
    )
    snapshots.commit(manifest)

    with pytest.raises(SnapshotError, match="no mu_product of t0"):
        ParameterStore(PartitionPlan(job.plan.spec, 1), 0).restore(
            SnapshotReader(snapshots, manifest)
        )


@given(
    st.dictionaries(
        st.sampled_from(["eta", "mu"]),
        st.dictionaries(st.integers(0, 99), st.floats(width=32, allow_nan=False)),
    )
)
def test_scalars_survive_json_bit_by_bit(scalars: dict[str, dict[int, float]]) -> None:
    assert scalars_from_json(scalars_to_json(scalars)) == scalars


def test_no_scalars_are_encoded_as_an_empty_text() -> None:
    assert scalars_to_json({}) == ""
    assert scalars_from_json("") == {}


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from([*CASES]),
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    pattern=st.lists(st.sets(st.integers(0, 4)), min_size=1, max_size=8),
    shards=st.integers(1, 3),
)
def test_a_random_model_steps_as_in_torch_for_any_present_gradients(
    name: str, sizes: list[int], pattern: list[set[int]], shards: int
) -> None:
    """pattern: the tensors without a gradient in each step, so that scalars differ."""
    tensors = [((size,), "float64", place % 2) for place, size in enumerate(sizes)]
    spec = model(*tensors, optimizer=OptimizerSettings(name, ({"lr": 1e-2}, {"lr": 2e-2})))
    job = begun(spec, shards)
    plain = plain_of(spec, job.weights())
    first = validate(spec.optimizer).groups
    for step, absent in enumerate(pattern):
        push = {
            key: value for key, value in noise(spec, step).items() if int(key[1:]) not in absent
        }
        groups = changed(first, step)
        plain.step(push, groups=groups)
        job.step(push, groups=groups)

    for tensor, weight in job.weights().items():
        torch.testing.assert_close(weight, plain.weights[tensor], rtol=1e-9, atol=1e-12)
