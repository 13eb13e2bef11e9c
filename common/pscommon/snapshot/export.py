"""Export of the trained weights to one plain safetensors file, and their digest."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pscommon.core.errors import SnapshotError
from pscommon.core.model_spec import ITEMSIZE, ModelSpec
from pscommon.core.partition import PartitionPlan
from pscommon.snapshot.atomic_files import AtomicFiles, publish, temporary, writing
from pscommon.snapshot.range_reader import SnapshotReader
from pscommon.snapshot.snapshot_dir import SnapshotDirectory
from pscommon.snapshot.tensor_file import RESERVED, raw

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEMSIZE}


def export(snapshots: SnapshotDirectory, version: int, path: Path) -> None:
    """Write all tensors of a snapshot, buffers and frozen ones included, as one safetensors file.

    `model.load_state_dict(safetensors.torch.load_file(path))` loads it: names, shapes and dtypes
    are those that the worker registered, tied tensors under each of their names. Needs as much
    memory as the weights.

    path: The file, which is replaced only by a complete one.

    Raises:
        SnapshotError: The snapshot cannot be read, or the file cannot be written.
    """
    manifest = snapshots.manifest(version)
    reader = SnapshotReader(snapshots, manifest)
    plan = PartitionPlan(manifest.model, manifest.shards)
    write_model(
        path,
        manifest.model,
        [_tensor(reader, plan, index) for index in range(len(manifest.model.tensors))],
    )


def write_model(path: Path, model: ModelSpec, tensors: Sequence[torch.Tensor]) -> None:
    """Write the tensors of a model, in its order, durably and under all their names.

    path: The file, which is replaced only by a complete one.

    Raises:
        SnapshotError: The file cannot be written.
    """
    if path.is_dir():
        raise SnapshotError(f"cannot write {path}: it is a folder")
    path = path.resolve()  # keeps a symbolic link
    named = {
        name: tensor
        for spec, tensor in zip(model.tensors, tensors, strict=True)
        for name in (spec.name, *spec.aliases)
    }
    if RESERVED in named:  # possible in a job of an older release
        remedy = (
            "Try: pull the weights of the running job with psworker.Client(observe=True).pull()"
        )
        raise SnapshotError(
            f"cannot write {path}: a tensor is named {RESERVED}, which the format reserves. "
            f"{remedy}"
        )
    files, folder = AtomicFiles(), path.parent
    with writing(path), temporary(files, folder, f"export-{os.getpid()}") as temp:
        # transformers and other libraries read "format"
        files.save(temp / path.name, named, {"format": "pt"})
        publish(files, temp / path.name, path)


def tensors_in_buffer(plan: PartitionPlan, memory: memoryview | bytearray) -> list[torch.Tensor]:
    """Return views of a flat buffer of plan.nbytes bytes, one for each tensor of the model."""
    # frombuffer refuses empty memory; the script may have set another default device
    empty = torch.empty(0, dtype=torch.uint8, device="cpu")
    buffer = torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else empty
    return [_view(buffer, plan, index) for index in range(len(plan.spec.tensors))]


def weights_sha256(named: Mapping[str, Any]) -> str:
    """Return the SHA-256, in hex, of the bytes of all tensors: two runs have the same result.

    The bytes are concatenated by name, ordered by code point. Names, shapes and dtypes do not
    affect the digest.

    Args:
        named: Buffers by name, C-contiguous and little-endian: numpy arrays, memoryviews or bytes.
    """
    digest = hashlib.sha256()
    for name in sorted(named):
        digest.update(named[name])
    return digest.hexdigest()


def _view(buffer: torch.Tensor, plan: PartitionPlan, index: int) -> torch.Tensor:
    spec, extent = plan.spec.tensors[index], plan.extent(index)
    return buffer[extent.start : extent.stop].view(TORCH_DTYPES[spec.dtype]).view(spec.shape)


def _tensor(reader: SnapshotReader, plan: PartitionPlan, index: int) -> torch.Tensor:
    spec = plan.spec.tensors[index]
    tensor = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
    if tensor.numel():
        start, stop = plan.extent(index)
        reader.read("weight", start, stop, raw(tensor))
    return tensor
