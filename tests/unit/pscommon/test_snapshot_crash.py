"""Power cuts and failing disks at every operation leave the previous snapshot valid."""

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from pscommon.core.errors import SnapshotError
from pscommon.snapshot import SnapshotDirectory, SnapshotReader
from pscommon.snapshot.atomic_files import AtomicFiles
from tests.support.snapshot_cases import TINY, random_buffer, save_tiny


class PowerCutError(Exception):
    """No operation is possible after this, not even cleaning up."""


class PowerCutDisk(AtomicFiles):
    """A disk that fails at its `limit`-th operation and then loses everything unsynced: bytes of
    unsynced files (the file is empty then), and renames and removals in unsynced folders (undone,
    the worst case).
    """

    def __init__(self, limit: int, spare: Path) -> None:
        self.operations = 0
        self._limit = limit
        self._spare = spare
        self._unsynced: set[Path] = set()
        self._undo: list[tuple[Path, Callable[[], object]]] = []

    def _count(self) -> None:
        self.operations += 1
        if self.operations > self._limit:
            raise PowerCutError

    def make_folder(self, path: Path) -> None:
        self._count()
        super().make_folder(path)
        self._undo.append((path.parent, lambda: shutil.rmtree(path, ignore_errors=True)))

    def save(
        self, path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
    ) -> str:
        self._unsynced.add(path)
        self._count()
        return super().save(path, tensors, metadata)

    def write(self, path: Path, data: bytes) -> None:
        self._unsynced.add(path)
        path.write_bytes(data[: len(data) // 2])
        self._count()
        super().write(path, data)

    def sync(self, path: Path) -> None:
        self._count()
        super().sync(path)
        self._unsynced.discard(path)
        self._undo = [(folder, undo) for folder, undo in self._undo if folder != path]

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        before = self._keep(target)
        super().rename(source, target)
        if source in self._unsynced:
            self._unsynced.add(target)
        self._undo.append(
            (target.parent, lambda: before.replace(target) if before.exists() else target.unlink())
        )

    def remove(self, path: Path) -> None:
        if not path.exists():
            return
        self._count()
        before = self._keep(path)
        super().remove(path)
        self._undo.append((path.parent, lambda: before.replace(path)))

    def cut(self) -> None:
        for path in self._unsynced:
            if path.exists():
                path.write_bytes(b"")
        for folder, undo in reversed(self._undo):
            if folder.exists():
                undo()

    def _keep(self, path: Path) -> Path:
        copy = self._spare / str(self.operations)
        if path.is_dir():
            shutil.copytree(path, copy)
        elif path.exists():
            copy.hardlink_to(path)
        return copy


def loads(data_dir: Path) -> int:
    """Return the version that a restart would load, after checking its weights."""
    snapshots = SnapshotDirectory(data_dir)
    snapshots.sweep(0)
    snapshots.sweep(1)
    manifest = snapshots.newest_valid().manifest
    assert manifest is not None
    expected = random_buffer(TINY, manifest.version)
    got = np.zeros_like(expected)
    assert SnapshotReader(snapshots, manifest).read("weight", 0, len(got), got.data)
    assert got.tobytes() == expected.tobytes()
    return manifest.version


def power_cuts(
    tmp_path: Path, prepare: Callable[[Path], object], act: Callable[[SnapshotDirectory], object]
) -> Iterator[Path]:
    """Yield the data directory after a power cut at each operation of `act`, and after all
    of it.
    """
    for limit in range(1000):
        data_dir, spare = tmp_path / f"data-{limit}", tmp_path / f"spare-{limit}"
        spare.mkdir()
        data_dir.mkdir()
        prepare(data_dir)
        disk = PowerCutDisk(limit, spare)
        try:
            act(SnapshotDirectory(data_dir, disk))
        except PowerCutError:
            disk.cut()
            yield data_dir
        else:
            disk.cut()
            yield data_dir
            return


def test_a_power_cut_during_a_write_leaves_the_previous_snapshot(tmp_path: Path) -> None:
    def prepare(data_dir: Path) -> None:
        save_tiny(SnapshotDirectory(data_dir), 1)

    versions = [
        loads(d)
        for d in power_cuts(tmp_path, prepare, lambda snapshots: save_tiny(snapshots, 2, shards=2))
    ]

    # the last two: a cut before the temporary folder is removed, and no cut
    assert len(versions) > 15
    assert versions == [1] * (len(versions) - 2) + [2] * 2


def test_a_power_cut_during_the_first_snapshot_leaves_no_snapshot(
    tmp_path: Path,
) -> None:
    cuts = list(power_cuts(tmp_path, lambda _: None, lambda snapshots: save_tiny(snapshots, 1)))
    found = [SnapshotDirectory(data_dir).newest_valid() for data_dir in cuts]

    assert [bool(newest.manifest) for newest in found] == [False] * (len(cuts) - 2) + [True] * 2
    assert [newest.skipped for newest in found] == [()] * len(cuts)


def test_a_power_cut_during_a_rewrite_leaves_one_of_the_two(tmp_path: Path) -> None:
    def prepare(data_dir: Path) -> None:
        save_tiny(SnapshotDirectory(data_dir), 2, shards=3)

    assert {
        loads(d) for d in power_cuts(tmp_path, prepare, lambda s: save_tiny(s, 2, shards=2))
    } == {2}


def test_a_power_cut_during_pruning_leaves_the_newest(tmp_path: Path) -> None:
    def prepare(data_dir: Path) -> None:
        for version in (1, 2, 3):
            save_tiny(SnapshotDirectory(data_dir), version)

    cuts = list(power_cuts(tmp_path, prepare, lambda snapshots: snapshots.prune(1)))

    assert [loads(data_dir) for data_dir in cuts] == [3] * 7
    assert all(
        SnapshotDirectory(d).verify(version) == []
        for d in cuts
        for version in SnapshotDirectory(d).versions()
    )


def test_a_sweep_removes_only_leftovers_of_its_shard(tmp_path: Path) -> None:
    remaining = save_tiny(SnapshotDirectory(tmp_path), 2)
    for name in (".tmp-1-part", ".tmp-10-part", ".tmp-0-manifest"):
        (remaining / name).mkdir()
        (remaining / name / "part.safetensors").write_bytes(b"half")

    assert SnapshotDirectory(tmp_path).sweep(1) == [remaining / ".tmp-1-part"]
    assert sorted(path.name for path in remaining.glob(".tmp*")) == [
        ".tmp-0-manifest",
        ".tmp-10-part",
    ]


class FullDisk(AtomicFiles):
    """Only the n-th operation fails, as on a full disk."""

    def __init__(self, limit: int) -> None:
        self.operations = 0
        self.limit = limit

    def _count(self, path: Path) -> None:
        self.operations += 1
        if self.operations == self.limit:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def make_folder(self, path: Path) -> None:
        self._count(path)
        super().make_folder(path)

    def save(
        self, path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
    ) -> str:
        path.write_bytes(b"half")
        self._count(path)
        path.unlink()
        return super().save(path, tensors, metadata)

    def write(self, path: Path, data: bytes) -> None:
        path.write_bytes(data[:10])
        self._count(path)
        super().write(path, data)

    def sync(self, path: Path) -> None:
        self._count(path)
        super().sync(path)

    def rename(self, source: Path, target: Path) -> None:
        self._count(source)
        super().rename(source, target)


def test_a_full_disk_is_an_error_with_the_path_and_leaves_no_temporary_file(
    tmp_path: Path,
) -> None:
    save_tiny(SnapshotDirectory(tmp_path), 1)
    counting = FullDisk(0)
    save_tiny(SnapshotDirectory(tmp_path, counting), 2)
    for limit in range(1, counting.operations + 1):
        shutil.rmtree(SnapshotDirectory(tmp_path).path(2), ignore_errors=True)
        with pytest.raises(SnapshotError, match=f"cannot write {tmp_path}.*No space left"):
            save_tiny(SnapshotDirectory(tmp_path, FullDisk(limit)), 2)
        loads(tmp_path)

        assert list(tmp_path.rglob(".tmp*")) == []
    assert counting.operations > 8


SHORT_WRITE = """
import resource, sys
import torch
from pathlib import Path
from pscommon.snapshot import SnapshotDirectory

resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
SnapshotDirectory(Path(sys.argv[1])).write_part(2, 0, 1, {"weight@0": torch.zeros(1000)}, {}, "[]")
"""


@pytest.mark.full
def test_a_truncated_write_is_an_error(tmp_path: Path) -> None:
    """In a child process: the limit applies to every file of a process, its output included."""
    save_tiny(SnapshotDirectory(tmp_path), 1)

    done = subprocess.run(
        [sys.executable, "-c", SHORT_WRITE, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3] / "common")},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert re.search(
        r"SnapshotError: cannot write .*000000000002: .*[Ff]ile too large", done.stderr
    )
    assert list(tmp_path.rglob(".tmp*")) == []
    assert loads(tmp_path) == 1


def test_a_folder_that_cannot_be_created_is_an_error_with_the_path(tmp_path: Path) -> None:
    (tmp_path / "snapshots").write_text("a file where the folder should be")
    with pytest.raises(SnapshotError, match=f"cannot write {tmp_path}"):
        save_tiny(SnapshotDirectory(tmp_path), 1)
