"""One plain file of the trained weights, for anybody's tools."""

import os
from pathlib import Path

import torch

from pscommon.core.errors import SnapshotError
from pscommon.core.model import ITEMSIZE
from pscommon.core.tape import Plan
from pscommon.snapshot.files import Files, publish, temporary, writing
from pscommon.snapshot.snapshots import Snapshots
from pscommon.snapshot.tape_reader import TapeReader
from pscommon.snapshot.tensor_file import raw

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEMSIZE}


def export(snapshots: Snapshots, version: int, path: Path) -> None:
    """Writes the weights of a snapshot, buffers and frozen tensors included, as one safetensors file.

    `model.load_state_dict(safetensors.torch.load_file(path))` takes it: names, shapes and dtypes are those that the
    worker registered. (A tensor that has two names is stored once; `safetensors.torch.load_model` handles that.)
    Needs as much memory as the weights. Raises SnapshotError; a file at `path` is replaced only by a whole one.
    """
    manifest = snapshots.manifest(version)
    reader = TapeReader(snapshots, manifest)
    plan = Plan(manifest.model, manifest.shards)
    tensors = {spec.name: _tensor(reader, plan, index) for index, spec in enumerate(manifest.model.tensors)}
    if path.is_dir():
        raise SnapshotError(f"cannot write {path}: it is a folder")
    files, folder = Files(), path.parent
    with writing(path), temporary(files, folder, f"export-{os.getpid()}") as temp:
        # "format" is what transformers and its kin look for
        files.save(temp / path.name, tensors, {"format": "pt"})
        publish(files, temp / path.name, path)


def _tensor(reader: TapeReader, plan: Plan, index: int) -> torch.Tensor:
    spec = plan.spec.tensors[index]
    tensor = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
    if tensor.numel():
        start, stop = plan.extent(index)
        reader.read("weight", start, stop, raw(tensor))
    return tensor
