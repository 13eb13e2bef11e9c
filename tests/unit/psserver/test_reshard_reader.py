"""A reshard moves every bit of the values, wherever the partitions begin."""

from collections.abc import Iterator

import pytest
import torch

from pscommon.core.errors import SnapshotError
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from pscommon.core.partition import ByteRange, PartitionPlan
from psserver.parameters.frozen_shard import FrozenBytes, FrozenDescription, FrozenShard
from psserver.parameters.store import ParameterStore
from psserver.peers.resharding import ReshardReader, needed_by
from tests.support.stores import Shards

MODEL = ModelSpec(
    (
        TensorSpec("big", (700,), "float32"),
        TensorSpec("odd", (13, 3), "float64", "trainable", 1),
        TensorSpec("seen", (5,), "float32", "buffer"),
        TensorSpec("count", (), "int64", "buffer"),
        TensorSpec("fixed", (9,), "float32", "frozen"),
    ),
    OptimizerSettings("adam", ({"lr": 0.1}, {"lr": 0.01})),
)


def values(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {
        tensor.name: torch.randint(-9, 9, tensor.shape, generator=made).to(
            getattr(torch, tensor.dtype)
        )
        for tensor in MODEL.tensors
    }


def push(seed: int) -> dict[str, torch.Tensor]:
    return {name: value for name, value in values(seed).items() if name != "fixed"}


def trained(shards: int, steps: int) -> Shards:
    job = Shards(MODEL, shards)
    job.begin(values(0))
    for step in range(steps):
        given = push(step + 1)
        if step == 1:
            del given["odd"]  # its step count is smaller
        job.step(given)
    return job


def moved(job: Shards, shards: int) -> Shards:
    frozen = [FrozenShard(1, 7, len(job.stores), store) for store in job.stores]
    others = Shards(MODEL, shards)
    for shard, store in enumerate(others.stores):
        store.restore(ReshardReader(job.plan, frozen, needed_by(others.plan, shard)))
    return others


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 1), (3, 2), (2, 40), (40, 3)])
@pytest.mark.parametrize("steps", [0, 3])
def test_training_after_a_reshard_has_the_same_bits_as_without_one(
    before: int, after: int, steps: int
) -> None:
    unmoved, other = trained(before, steps), moved(trained(before, steps), after)
    for step in range(2):
        for job in (unmoved, other):
            job.step(push(100 + step))

    ours, theirs = unmoved.weights(), other.weights()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


class TruncatedShard:
    """Shard that lacks the first bytes of its partition."""

    def __init__(self, frozen: FrozenShard, hole: int) -> None:
        self._frozen, self._hole = frozen, hole

    def describe(self) -> FrozenDescription:
        return self._frozen.describe()

    def read(self, kind: str, span: ByteRange) -> Iterator[FrozenBytes]:
        return self._frozen.read(kind, ByteRange(max(span.start, self._hole), span.stop))


def test_missing_weights_are_an_error() -> None:
    job, plan = trained(1, 0), PartitionPlan(MODEL, 2)
    source = TruncatedShard(FrozenShard(1, 7, 1, job.stores[0]), hole=64)

    with pytest.raises(SnapshotError, match="no shard has all weights of big"):
        ParameterStore(plan, 0).restore(ReshardReader(job.plan, [source], needed_by(plan, 0)))
    ParameterStore(plan, 1).restore(ReshardReader(job.plan, [source], needed_by(plan, 1)))


def test_only_shards_with_a_part_of_the_range_are_read() -> None:
    """The others may be dead: a shard that keeps its number among many reads from few."""
    job = trained(40, 1)
    asked: list[int] = []

    class RecordingShard(TruncatedShard):
        def describe(self) -> FrozenDescription:
            asked.append(self._frozen.index)
            return super().describe()

    sources = [
        RecordingShard(FrozenShard(1, shard, 40, store), 0)
        for shard, store in enumerate(job.stores)
    ]
    ReshardReader(job.plan, sources, [job.plan.range(3, "trainable")])

    assert asked == [3]
