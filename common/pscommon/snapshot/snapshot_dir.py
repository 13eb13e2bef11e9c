"""The snapshots of a data directory: writing, finding, checking and removing them."""

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
    """What `newest_valid` found; skipped says of each newer snapshot why it is not the one, a
    line per problem.
    """

    manifest: Manifest | None
    skipped: tuple[str, ...]


class FileFingerprint(NamedTuple):
    """Fingerprint of a file that changes with each write: inode, bytes, change time in ns."""

    inode: int
    nbytes: int
    changed_ns: int


class SnapshotDirectory:
    """All snapshots in <data_dir>/snapshots. The format is described in pscommon.snapshot.

    Writing: every shard calls `write_part`, then the coordinator, knowing all parts, calls
    `commit`; only that makes a snapshot of them. Everything that cannot be written or read
    raises SnapshotError with the path, and leaves the snapshots that were there as they were.
    Safe to use from several threads, as long as each shard writes one part at a time.
    """

    def __init__(self, data_dir: Path, files: AtomicFiles | None = None) -> None:
        self.folder = data_dir / "snapshots"
        self._files = files or AtomicFiles()
        self._sound: dict[Path, tuple[FileFingerprint, str]] = {}

    def path(self, version: int) -> Path:
        """The folder of a version, whether or not it is there."""
        return self.folder / f"{version:012d}"

    def versions(self) -> list[int]:
        """Versions that have a manifest, valid or not, ascending."""
        with reading(self.folder):
            return [
                version for version in self._folders() if (self.path(version) / MANIFEST).is_file()
            ]

    def manifest(self, version: int) -> Manifest:
        """The checked manifest of a version; its parts are not looked at."""
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
        """Reads every byte of a snapshot. Returns a line per problem, with the path; empty when
        it is sound.

        A part that lies elsewhere by design (a server with a disk of its own) is no problem; see
        `absent`.
        """
        for part_path in list(self._sound):
            if part_path.parent == self.path(version):
                del self._sound[part_path]
        return self._problems(version)

    def absent(self, manifest: Manifest) -> list[SnapshotPart]:
        """Parts of other disks that this folder does not hold."""
        folder = self.path(manifest.version)
        return [
            part
            for part in manifest.parts
            if part.file in manifest.elsewhere and not (folder / part.file).exists()
        ]

    def check(self, version: int, part: SnapshotPart) -> Path:
        """The path of a part that is here and has the bytes that the manifest tells;
        SnapshotError if not.

        A file that this object has checked, or written, is read again only if it has changed
        since.
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
        """The newest snapshot without a problem, and what is wrong with the newer ones: worth a
        loud line each.
        """
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
        """Writes one shard's part of a version, durably, and says what `commit` needs to know of
        it.

        tensors: one-dimensional, contiguous, named "<kind>@<tape start>". steps: optimizer steps
        by index of tensor. scalars_json: as `scalars_to_json` makes it; written only where the
        optimizer has scalars.
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
        """What was made for a part that could not be written is removed, unless another shard's
        part lies there.
        """
        try:
            yield
        except BaseException:
            for path in (folder, self.folder):
                with contextlib.suppress(OSError):
                    path.rmdir()
            raise

    def commit(self, manifest: Manifest) -> Path:
        """Makes the parts a snapshot by writing its manifest, and returns its folder.

        Parts that are not in the folder are noted as lying elsewhere; one that is there must
        have its length.
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
        """Removes all but the newest `keep` valid snapshots, at least one; returns the removed
        versions.

        Nothing that is newer than the newest valid snapshot is touched, damaged or not.
        """
        valid: list[int] = []
        for version in reversed(self.versions()):
            if len(valid) < max(1, keep) and not self._problems(version):
                valid.append(version)
        return self.retain(valid)

    def retain(self, keep: Collection[int], job: str | None = None) -> list[int]:
        """Removes every version, finished or not, that is older than the newest of `keep` and
        not in it.

        For a server on a disk of its own, which has parts but no manifests: the coordinator
        knows what to keep. job: it keeps those of this one; what has a manifest of another one
        is not its to remove.
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
        """Renames the snapshots newer than `version`, when the job starts again from there;
        returns the new paths.

        They belong to a history that is over: left where they are, the next resume would take them for the newest.
        -1 sets all aside.
        """
        return [self._set_aside(self.path(newer)) for newer in self.versions() if newer > version]

    def sweep(self, shard: int) -> list[Path]:
        """Removes what a crash of this shard left half-written. Call it at start, holding the
        shard's DataDirLock.
        """
        left = sorted(self.folder.glob(f"*/{TEMP}{shard}-*"))
        for path in left:
            with writing(path):
                self._files.remove(path)
        return left

    def _job(self, version: int) -> str:
        """Whose a version is; empty where no manifest says so."""
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
        """Takes a part that its shard has just written and hashed for sound: no need to read it
        all again.
        """
        with reading(path):
            found = _fingerprint(path)
        if found.nbytes != part.nbytes:
            raise SnapshotError(f"{path}: {found.nbytes} bytes, its shard wrote {part.nbytes}")
        self._sound[path] = (found, part.sha256)

    def _remove(self, folder: Path) -> None:
        """Manifest first: a crash midway leaves no snapshot rather than a damaged one."""
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
