"""Files of data directories, and ways to damage them."""

import tarfile
from pathlib import Path
from typing import Any

import safetensors.torch

from pscommon.snapshot import SnapshotDirectory, export

FIXTURES = Path(__file__).parents[1] / "fixtures" / "data_directories"


def unpack(name: str, folder: Path) -> Path:
    """Extract a data directory of an earlier release."""
    with tarfile.open(FIXTURES / f"{name}.tar.xz") as tar_file:
        tar_file.extractall(folder, filter="data")
    return folder / name


def stored(data_dir: Path, version: int) -> dict[str, Any]:
    """Return the weights in a snapshot by name."""
    path = data_dir / f"{version}.safetensors"
    export(SnapshotDirectory(data_dir), version, path)
    return {name: tensor.numpy() for name, tensor in safetensors.torch.load_file(path).items()}


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
