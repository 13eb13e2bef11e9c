"""The exported file is plain safetensors that plain torch loads."""

import stat
from pathlib import Path

import pytest
import safetensors.torch
import torch

from pscommon.core.errors import SnapshotError
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, Role, TensorSpec
from pscommon.core.partition import PartitionPlan
from pscommon.snapshot import SnapshotDirectory, export
from tests.support.snapshot_cases import (
    MIXED,
    manifest_of,
    random_buffer,
    save,
    shard_tensors,
    typed,
)


class Net(torch.nn.Module):
    """A model with every kind of tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(13, 7)
        self.norm = torch.nn.BatchNorm1d(7)
        self.half = torch.nn.Linear(7, 3, dtype=torch.bfloat16)
        self.scalar = torch.nn.Parameter(torch.randn((), dtype=torch.float64))
        self.frozen = torch.nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("mask", torch.rand(4, 4) > 0.5)
        self.register_buffer("nothing", torch.zeros(0, 3))


def spec_of(net: Net) -> ModelSpec:
    def role(name: str) -> Role:
        if name in dict(net.named_buffers()):
            return "buffer"
        return "frozen" if name == "frozen" else "trainable"

    tensors = tuple(
        TensorSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), role(name))
        for name, t in net.state_dict().items()
    )
    return ModelSpec(tensors, OptimizerSettings("sgd", ({"lr": 0.1},)))


def buffer_from(net: Net, plan: PartitionPlan) -> "torch.Tensor":
    buffer = torch.zeros(plan.nbytes, dtype=torch.uint8)
    for index, tensor in enumerate(net.state_dict().values()):
        start, stop = plan.extent(index)
        buffer[start:stop] = tensor.reshape(-1).view(torch.uint8)
    return buffer


@pytest.mark.parametrize("shards", [1, 3])
def test_plain_torch_loads_the_file_into_the_model(tmp_path: Path, shards: int) -> None:
    torch.manual_seed(0)
    net, other = Net(), Net()
    net.norm(torch.randn(4, 7))
    plan, snapshots = PartitionPlan(spec_of(net), shards), SnapshotDirectory(tmp_path)
    buffer = buffer_from(net, plan).numpy()
    parts = tuple(
        snapshots.write_part(
            9, shard, shards, shard_tensors(plan, shard, {"weight": buffer}), {}, "[]"
        )
        for shard in range(shards)
    )
    snapshots.commit(manifest_of(9, plan.spec, parts))
    export(snapshots, 9, tmp_path / "model.safetensors")
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))

    for name, tensor in net.state_dict().items():
        assert other.state_dict()[name].dtype == tensor.dtype
        assert torch.equal(other.state_dict()[name], tensor), name


def test_names_shapes_dtypes_and_bytes_are_the_registered_ones(tmp_path: Path) -> None:
    snapshots, buffer = SnapshotDirectory(tmp_path), random_buffer(MIXED, 3)
    save(snapshots, 4, MIXED, 2, {"weight": buffer, "exp_avg": random_buffer(MIXED, 4)})
    export(snapshots, 4, tmp_path / "model.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")

    assert loaded.keys() == {spec.name for spec in MIXED.tensors}
    for index, spec in enumerate(MIXED.tensors):
        start, stop = PartitionPlan(MIXED, 1).extent(index)
        expected = typed(buffer, start, stop, spec.dtype).reshape(spec.shape)
        assert (loaded[spec.name].shape, loaded[spec.name].dtype) == (
            expected.shape,
            expected.dtype,
        )
        assert (
            bytes(loaded[spec.name].reshape(-1).view(torch.uint8)) == buffer[start:stop].tobytes()
        )


def test_an_existing_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    snapshots, folder = SnapshotDirectory(tmp_path / "data"), tmp_path / "out"
    save(snapshots, 4, MIXED, 2, {"weight": random_buffer(MIXED, 3)})
    folder.mkdir()
    target = folder / "model.safetensors"
    target.write_bytes(b"old")
    export(snapshots, 4, target)

    assert list(folder.iterdir()) == [target]
    assert stat.S_IMODE(target.stat().st_mode) == stat.S_IMODE(plain_file(tmp_path).stat().st_mode)
    assert len(safetensors.torch.load_file(target)) == len(MIXED.tensors)


def plain_file(folder: Path) -> Path:
    (folder / "plain").write_bytes(b"")
    return folder / "plain"


def test_a_damaged_snapshot_is_not_exported(tmp_path: Path) -> None:
    folder = save(SnapshotDirectory(tmp_path), 4, MIXED, 1, {"weight": random_buffer(MIXED, 3)})
    part = next(folder.glob("*.safetensors"))
    part.write_bytes(bytes(part.stat().st_size))

    with pytest.raises(SnapshotError, match="damaged"):
        export(SnapshotDirectory(tmp_path), 4, tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("target", ["data", "no/such/folder/model.safetensors"])
def test_an_unwritable_place_is_an_error_with_its_path(tmp_path: Path, target: str) -> None:
    snapshots = SnapshotDirectory(tmp_path / "data")
    save(snapshots, 4, MIXED, 1, {"weight": random_buffer(MIXED, 3)})

    with pytest.raises(SnapshotError, match=f"cannot write {tmp_path / target}"):
        export(snapshots, 4, tmp_path / target)


def test_a_name_that_the_format_reserves_is_refused_with_a_remedy(tmp_path: Path) -> None:
    """The job began before such names were refused."""
    spec = ModelSpec(
        (TensorSpec("__metadata__", (2,), "float32"),), OptimizerSettings("sgd", ({"lr": 0.1},))
    )
    snapshots = SnapshotDirectory(tmp_path)
    save(snapshots, 3, spec, 1, {"weight": random_buffer(spec, 3)})

    with pytest.raises(
        SnapshotError, match=r"a tensor is named __metadata__, which the format reserves\. Try: "
    ):
        export(snapshots, 3, tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()
