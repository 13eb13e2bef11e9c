"""The file of --save: one version of all shards, or none."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from pscommon.core.errors import UnreachableError
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from pscommon.core.partition import ByteRange, PartitionPlan
from psserver.parameters.frozen_shard import FrozenBytes
from psserver.peers import final_weights

MODEL = ModelSpec(
    (
        TensorSpec("w", (40, 3), "float32", aliases=("tied",)),
        TensorSpec("b", (5,), "float32", "frozen"),
        TensorSpec("n", (), "int64", "buffer"),
    ),
    OptimizerSettings("sgd"),
)


class VersionedShard:
    """Shard whose bytes all equal its version. versions: its reported versions in turn; the last
    one repeats.
    """

    def __init__(self, *versions: int) -> None:
        self._versions = list(versions)

    @property
    def version(self) -> int:
        return self._versions.pop(0) if len(self._versions) > 1 else self._versions[0]

    def read(self, kind: str, span: ByteRange) -> Iterator[FrozenBytes]:
        assert kind == "weight"
        yield FrozenBytes(span.start, memoryview(bytes([self._versions[0]]) * span.nbytes))


def settled_weights(*shards: VersionedShard, seconds: float = 5.0) -> bytearray:
    return final_weights._read_one_version(PartitionPlan(MODEL, len(shards)), shards, seconds)


def test_the_bytes_of_all_roles_are_read() -> None:
    buffer = settled_weights(VersionedShard(7), VersionedShard(7), VersionedShard(7))
    plan = PartitionPlan(MODEL, 3)

    for index in range(len(MODEL.tensors)):
        assert set(buffer[slice(*plan.extent(index))]) == {7}


def test_shards_that_are_behind_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(final_weights, "RETRY_INTERVAL_SECONDS", 0.0)

    assert 3 in settled_weights(VersionedShard(3), VersionedShard(1, 2, 3))


def test_a_version_that_changes_during_the_read_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pushes may still count when only a server ends and not the job."""
    monkeypatch.setattr(final_weights, "RETRY_INTERVAL_SECONDS", 0.0)
    buffer = settled_weights(VersionedShard(1, 2), VersionedShard(1, 2))

    assert set(buffer[slice(*PartitionPlan(MODEL, 2).extent(0))]) == {2}


def test_shards_that_never_agree_are_reported_with_their_versions() -> None:
    with pytest.raises(UnreachableError, match=r"at versions \[3, 4\]"):
        settled_weights(VersionedShard(3), VersionedShard(4), seconds=0.0)


def test_a_flat_buffer_becomes_tensors_under_all_names(tmp_path: Path) -> None:
    plan = PartitionPlan(MODEL, 1)
    buffer = bytearray(plan.nbytes)
    final_weights.write_model(tmp_path / "f", MODEL, final_weights.tensors_in_buffer(plan, buffer))

    found = load_file(tmp_path / "f")
    assert {name: list(tensor.shape) for name, tensor in found.items()} == {
        "w": [40, 3],
        "tied": [40, 3],
        "b": [5],
        "n": [],
    }
