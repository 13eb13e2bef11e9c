"""The snapshots of a data directory: write, find, check and remove them."""

import contextlib
import dataclasses
import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from pscommon.core.errors import SnapshotError
from pscommon.snapshot.atomic_files import (
    TEMP,
    AtomicFiles,
    make_folders,
    publish,
    reading,
    sha256,
    temporary,
    writing,
)
from pscommon.snapshot.manifest import MANIFEST, Manifest, SnapshotPart, part_file

_VERSION = re.compile(r"\d{12,}", re.ASCII)


class NewestSnapshot(NamedTuple):
    """Result of `newest_valid`.

    manifest: the newest valid snapshot; None without one.
    skipped: problems of newer snapshots, one line each.
    """

    manifest: Manifest | None
    skipped: tuple[str, ...]


class FileFingerprint(NamedTuple):
    """Fingerprint of a file that changes with each write.

    inode: inode number.
    nbytes: size.
    changed_ns: modification time, in nanoseconds.
    """

    inode: int
    nbytes: int
    changed_ns: int


class SnapshotDirectory:
    """All snapshots in <data_dir>/snapshots. pscommon.snapshot describes the format.

    Every shard calls `write_part`. Then the coordinator, which knows all parts, calls `commit`;
    only this makes them a snapshot. If a method cannot read or write a file, it raises
    SnapshotError with the path, and leaves the existing snapshots unchanged. Several threads may
    use one object, but each shard may write only one part at a time.

    folder: the folder of all snapshots.
    """

    def __init__(self, data_dir: Path, files: AtomicFiles | None = None) -> None:
        self.folder = data_dir / "snapshots"
        self._files = files or AtomicFiles()
        self._sound: dict[Path, tuple[FileFingerprint, str]] = {}

    def path(self, version: int) -> Path:
        """Return the folder of a version, which may not exist."""
        return self.folder / f"{version:012d}"

    def versions(self) -> list[int]:
        """Return the versions that have a manifest, valid or not, ascending."""
        with reading(self.folder):
            return [
                version for version in self._folders() if (self.path(version) / MANIFEST).is_file()
            ]

    def manifest(self, version: int) -> Manifest:
        """Return the checked manifest of a version; the parts are not checked."""
        path = self.path(version) / MANIFEST
        with reading(path):
            raw = path.read_bytes()
        try:
            manifest = Manifest.from_json(raw.decode("ascii"))
        except (SnapshotError, UnicodeDecodeError) as error:
            raise SnapshotError(f"{path}: {error}") from error
        if manifest.version != version:
            raise SnapshotError(f"{path}: is of version {manifest.version}")
        return manifest

    def verify(self, version: int) -> list[str]:
        """Read every byte of a snapshot and return its problems, one line each with the path.

        A part that is on another server's disk by design is not a problem; see `absent`.
        """
        for part_path in list(self._sound):
            if part_path.parent == self.path(version):
                del self._sound[part_path]
        return self._problems(version)

    def absent(self, manifest: Manifest) -> list[SnapshotPart]:
        """Return the parts on other disks that this folder does not contain."""
        folder = self.path(manifest.version)
        return [
            part
            for part in manifest.parts
            if part.file in manifest.elsewhere and not (folder / part.file).exists()
        ]

    def check(self, version: int, part: SnapshotPart) -> Path:
        """Check that a part exists and has the bytes that the manifest describes; return its path.

        A file that this object has checked or written is read again only if it has changed since.

        Raises:
            SnapshotError: The part is missing or damaged.
        """
        path = self.path(version) / part.file
        with reading(path):
            found = _fingerprint(path)
            if found.nbytes != part.nbytes:
                raise SnapshotError(
                    f"{path}: {found.nbytes} bytes, the manifest says {part.nbytes}"
                )
            if self._sound.get(path) != (found, part.sha256):
                if sha256(path) != part.sha256:
                    raise SnapshotError(f"{path}: damaged: its SHA-256 is not the manifest's")
                self._sound[path] = (found, part.sha256)
        return path

    def newest_valid(self) -> NewestSnapshot:
        """Return the newest valid snapshot and the problems of newer ones, for the log."""
        skipped: list[str] = []
        for version in reversed(self.versions()):
            problems = self._problems(version)
            if not problems:
                return NewestSnapshot(self.manifest(version), tuple(skipped))
            skipped += problems
        return NewestSnapshot(None, tuple(skipped))

    def write_part(
        self,
        version: int,
        shard: int,
        shards: int,
        tensors: Mapping[str, torch.Tensor],
        steps: Mapping[int, int],
        groups_json: str,
        scalars_json: str = "",
    ) -> SnapshotPart:
        """Write one shard's part of a version durably, and return what `commit` needs of it.

        Args:
            version: Version of the snapshot.
            shard: Number of the shard.
            shards: Number of shards.
            tensors: One-dimensional and contiguous, by name "<kind>@<start in the flat buffer>".
            steps: Optimizer steps by index of tensor.
            groups_json: Hyper-parameters of each parameter group.
            scalars_json: Result of `scalars_to_json`; stored only if the optimizer has scalars.

        Raises:
            SnapshotError: The part cannot be written.
        """
        folder = self.path(version)
        metadata = {"steps": json.dumps(dict(steps)), "groups": groups_json}
        if scalars_json:
            metadata["scalars"] = scalars_json
        with self._no_empty_folder(folder), writing(folder):
            make_folders(self._files, folder)
            with temporary(self._files, folder, f"{shard}-part") as temp:
                written = temp / "part.safetensors"
                digest = self._files.save(written, tensors, metadata)
                part = SnapshotPart(
                    part_file(shard, shards, digest), written.stat().st_size, digest
                )
                publish(self._files, written, folder / part.file)
            self._sound[folder / part.file] = (_fingerprint(folder / part.file), digest)
        return part

    @contextlib.contextmanager
    def _no_empty_folder(self, folder: Path) -> Iterator[None]:
        """Remove the folders of a part that could not be written, if no other part is in them."""
        try:
            yield
        except BaseException:
            for path in (folder, self.folder):
                with contextlib.suppress(OSError):
                    path.rmdir()
            raise

    def commit(self, manifest: Manifest) -> Path:
        """Make the parts a snapshot by writing its manifest; return its folder.

        Parts that are not in the folder are recorded as being elsewhere.

        Raises:
            SnapshotError: No part is in the folder, one has another size, or the write fails.
        """
        folder = self.path(manifest.version)
        here = [part for part in manifest.parts if (folder / part.file).exists()]
        if not here:
            raise SnapshotError(f"{folder} holds none of the parts of version {manifest.version}")
        for part in here:
            self._trust(folder / part.file, part)
        elsewhere = tuple(part.file for part in manifest.parts if part not in here)
        text = dataclasses.replace(manifest, elsewhere=elsewhere).as_json()
        with writing(folder), temporary(self._files, folder, "0-manifest") as temp:
            self._files.write(temp / MANIFEST, text.encode("ascii"))
            publish(self._files, temp / MANIFEST, folder / MANIFEST)
        return folder

    def prune(self, keep: int) -> list[int]:
        """Remove all but the newest `keep` valid snapshots, at least one; return removed versions.

        Snapshots newer than the newest valid one are kept, damaged or not.
        """
        valid: list[int] = []
        for version in reversed(self.versions()):
            if len(valid) < max(1, keep) and not self._problems(version):
                valid.append(version)
        return self.retain(valid)

    def retain(self, keep: Collection[int], job: str | None = None) -> list[int]:
        """Remove each version, complete or not, older than the newest of `keep` and not in it.

        A server with its own disk has parts but no manifests; the coordinator supplies `keep`.

        Args:
            keep: Versions to keep.
            job: Remove only versions of this job or without a manifest; None: of any job.

        Returns:
            The removed versions.
        """
        older = [
            version
            for version in self._folders()
            if keep and version < max(keep) and version not in keep
        ]
        removed = [version for version in older if job is None or self._job(version) in ("", job)]
        for version in removed:
            self._remove(self.path(version))
        return removed

    def set_aside(self, version: int) -> list[Path]:
        """Rename the snapshots newer than `version`, from which the job starts again; -1 means all.

        They belong to an old history. With their old names the next resume would choose them as the
        newest.

        Returns:
            The new paths.
        """
        return [self._set_aside(self.path(newer)) for newer in self.versions() if newer > version]

    def sweep(self, shard: int) -> list[Path]:
        """Remove the incomplete files of this shard after a crash; return their paths.

        Call it at start, with the shard's DataDirLock held.
        """
        left = sorted(self.folder.glob(f"*/{TEMP}{shard}-*"))
        for path in left:
            with writing(path):
                self._files.remove(path)
        return left

    def _job(self, version: int) -> str:
        """Return the job of a version; empty without a valid manifest."""
        try:
            return self.manifest(version).job
        except SnapshotError:
            return ""

    def _folders(self) -> list[int]:
        with reading(self.folder):
            names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(
            int(name) for name in names if _VERSION.fullmatch(name) and name == f"{int(name):012d}"
        )

    def _problems(self, version: int) -> list[str]:
        try:
            manifest = self.manifest(version)
        except SnapshotError as error:
            return [str(error)]
        absent = self.absent(manifest)
        problems = [self._problem(version, part) for part in manifest.parts if part not in absent]
        return [problem for problem in problems if problem]

    def _problem(self, version: int, part: SnapshotPart) -> str:
        try:
            self.check(version, part)
        except SnapshotError as error:
            return str(error)
        return ""

    def _trust(self, path: Path, part: SnapshotPart) -> None:
        """Accept a part that its shard has just written and hashed, without reading it again."""
        with reading(path):
            found = _fingerprint(path)
        if found.nbytes != part.nbytes:
            raise SnapshotError(f"{path}: {found.nbytes} bytes, its shard wrote {part.nbytes}")
        self._sound[path] = (found, part.sha256)

    def _remove(self, folder: Path) -> None:
        """Remove a snapshot, manifest first: after a crash midway no damaged snapshot is left."""
        with writing(folder):
            if (folder / MANIFEST).exists():
                self._files.remove(folder / MANIFEST)
                self._files.sync(folder)
            self._files.remove(folder)
        self._sound = {path: known for path, known in self._sound.items() if path.parent != folder}

    def _set_aside(self, folder: Path) -> Path:
        number = 1
        while (target := folder.with_name(f"{folder.name}.aside-{number}")).exists():
            number += 1
        with writing(target):
            self._files.rename(folder, target)
            self._files.sync(self.folder)
        return target


def _fingerprint(path: Path) -> FileFingerprint:
    found = path.stat()
    return FileFingerprint(found.st_ino, found.st_size, found.st_mtime_ns)
