"""Atomic, durable files: a name appears only when its content is complete and on disk.

The order is always: write a temporary file, fsync, rename, fsync the folder. After a crash at any
point the name is either missing or refers to all of the bytes.
"""

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError

from pscommon.core.errors import SnapshotError
from pscommon.snapshot.tensor_file import write_tensors

TEMP = ".tmp-"


class AtomicFiles:
    """The operations that change a disk, one method each, so that a test can make each fail."""

    def make_folder(self, path: Path) -> None:
        path.mkdir()

    def save(
        self, path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
    ) -> str:
        """Write a safetensors file and return its SHA-256 in hex. Not durable before `sync`."""
        return write_tensors(path, tensors, metadata)

    def write(self, path: Path, data: bytes) -> None:
        """Write a file. Not durable before `sync`."""
        path.write_bytes(data)

    def overwrite(self, path: Path, offset: int, data: bytes) -> None:
        """Overwrite bytes of a file in place, which needs no space. Not durable before `sync`."""
        with path.open("r+b", buffering=0) as file:
            file.seek(offset)
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def sync(self, path: Path) -> None:
        """Sync a file's bytes, or a folder's directory entries, to disk."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with its contents."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def make_folders(files: AtomicFiles, path: Path) -> None:
    """Create a folder and its parents, each durably."""
    if path.is_dir():
        return
    make_folders(files, path.parent)
    with contextlib.suppress(FileExistsError):  # another shard has created it
        files.make_folder(path)
    files.sync(path.parent)


@contextlib.contextmanager
def temporary(files: AtomicFiles, folder: Path, label: str) -> Iterator[Path]:
    """Yield a new folder inside `folder`, and remove it afterwards.

    After a crash `SnapshotDirectory.sweep` removes it.
    """
    path = folder / f"{TEMP}{label}"
    files.remove(path)
    files.make_folder(path)
    try:
        yield path
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is reported
            files.remove(path)
        raise
    files.remove(path)


def publish(files: AtomicFiles, written: Path, target: Path) -> None:
    """Rename a written file to its final name, durably."""
    files.sync(written)
    files.rename(written, target)
    files.sync(target.parent)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an OSError of the body, such as a full disk, to a SnapshotError with the path."""
    try:
        yield
    except OSError as error:
        raise SnapshotError(f"cannot write {path}: {_cause(error)}") from error


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert an OSError or SafetensorError of the body to a SnapshotError with the path."""
    try:
        yield
    except FileNotFoundError as error:
        raise SnapshotError(f"{path.name} is missing in {path.parent}") from error
    except (OSError, SafetensorError) as error:
        raise SnapshotError(f"cannot read {path}: {_cause(error)}") from error


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cause(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
