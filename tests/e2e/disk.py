"""What lies in a data directory, and how to spoil it."""

from pathlib import Path
from typing import Any

import safetensors.torch

from pscommon.snapshot import SnapshotDirectory, export


def stored(data_dir: Path, version: int) -> dict[str, Any]:
    """The weights in a snapshot, by name."""
    path = data_dir / f"{version}.safetensors"
    export(SnapshotDirectory(data_dir), version, path)
    return {name: tensor.numpy() for name, tensor in safetensors.torch.load_file(path).items()}


def flip(path: Path) -> None:
    """One bit in the middle of a file."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
