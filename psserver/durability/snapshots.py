"""Snapshots of a server: choose the one to resume, write parts in the background, commit them."""

import contextlib
import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

from pscommon.core.errors import MismatchError, SnapshotError
from pscommon.core.log_entries import Cut
from pscommon.core.model_spec import ROLES, ModelSpec
from pscommon.core.partition import PartitionPlan
from pscommon.optim.specs import groups_to_json, scalars_to_json
from pscommon.snapshot import Manifest, SnapshotDirectory, SnapshotPart, SnapshotReader
from pscommon.system.imports import installed
from pscommon.telemetry.logs import get_logger
from psserver.core.job.snapshot_schedule import PartReport, SnapshotInProgress
from psserver.parameters.store import ParameterStore
from psserver.process.generation_file import GENERATION, GenerationCounter
from psserver.process.metrics import ServerMetrics

WRITER_NICENESS = 10
"""Niceness of the writing thread: a tenth of another thread's share of a busy core."""

log = get_logger(__name__)


class SnapshotManager:
    """Snapshots of one shard; on shard 0, of the whole job. Does nothing without a data directory.

    enabled: whether there is a data directory.
    newest_version: version of the newest snapshot; None without one.
    newest_time: when it was written, in seconds since 1970.
    problem: why the last snapshot failed; empty if it did not.
    failures: number of failed snapshots of the job.
    logs_failures: whether failures are logged here; otherwise the requester logs them.
    retained: versions of the existing snapshots.
    generations: counts the starts of the job.
    resumed: progress of the job before this process, for the status.
    """

    def __init__(
        self, data_dir: Path | None, shard: int, keep: int, metrics: ServerMetrics
    ) -> None:
        self.enabled = data_dir is not None
        self.newest_version: int | None = None
        self.newest_time: float | None = None
        self.problem = ""
        self.failures = 0
        self.logs_failures = True
        self.retained: list[int] = []
        self.generations = GenerationCounter(data_dir)
        self.resumed: dict[str, int] | None = None
        self._shard, self._keep, self._metrics = shard, keep, metrics
        self._data_dir = data_dir
        self._snapshots = SnapshotDirectory(data_dir) if data_dir else None
        self._exported: dict[str, torch.Tensor] = {}
        self._writer: threading.Thread | None = None
        if self._snapshots is not None:
            for path in self._snapshots.sweep(shard):
                log.warning("partial_snapshot_removed", path=str(path))

    # ---- starting --------------------------------------------------------------------------------

    def check_data_dir(self) -> None:
        """Check that this data directory may belong to shard 0.

        A directory with parts or logs of shards, in which shard 0 never started, is refused. Copied
        snapshots are allowed.

        Raises MismatchError if the directory belongs to another shard.
        """
        if self._data_dir is None or self._snapshots is None:
            return
        if (self._data_dir / GENERATION).exists() or self._snapshots.versions():
            return
        if found := [
            *self._data_dir.glob("log-shard-*"),
            *self._data_dir.glob("snapshots/*/shard-*"),
        ]:
            raise MismatchError(
                f"data directory {self._data_dir} is not that of shard 0: {found[0]} belongs to "
                "another shard. Try: start each server with its own earlier `--data-dir`, or "
                "`--resume never` to begin a new job here",
                "SHARD_MISMATCH",
            )

    def choose_start(self, resume: Literal["auto", "never"] | int) -> Manifest | None:
        """Return the snapshot to resume from; None without one.

        resume: Value of --resume; a number is a version.

        Raises SnapshotError if the requested version, or every existing one, is missing or damaged.
        """
        if self._snapshots is None:
            return None
        versions = self._snapshots.versions()
        if resume == "never":
            self._set_aside(-1)
            return None
        if isinstance(resume, int):
            return self.find(resume)
        manifest, skipped = self._snapshots.newest_valid()
        for problem in skipped:
            log.error("snapshot_damaged", problem=problem)
        if manifest is None and versions:
            raise SnapshotError(
                f"none of the snapshots in {self._snapshots.folder} is valid: {'; '.join(skipped)}"
            )
        return manifest

    def find(self, version: int) -> Manifest:
        """Return the snapshot of this version. Raises SnapshotError if it is missing or damaged."""
        if self._snapshots is None:
            raise SnapshotError("these servers have no --data-dir", "NO_SNAPSHOT")
        if version not in self._snapshots.versions():
            raise SnapshotError(
                f"no snapshot of version {version} in {self._snapshots.folder}; there are "
                f"{self._snapshots.versions()}",
                "NO_SNAPSHOT",
            )
        if problems := self._snapshots.verify(version):
            raise SnapshotError("; ".join(problems))
        return self._snapshots.manifest(version)

    def continue_from(self, manifest: Manifest) -> None:
        """Record that the job continues from this snapshot; set newer ones aside."""
        self._set_aside(manifest.version)
        self.retained = [version for version in self.retained if version <= manifest.version]
        self.newest_version = manifest.version
        self.newest_time = _written_at(manifest)

    def begin_training(self) -> None:
        """Set all snapshots aside: they are of a training that is over."""
        if self._snapshots is not None:
            self.close()  # a part of the last training may still be written
            count = len(self._snapshots.set_aside(-1))
            log.info("snapshots_of_training_set_aside", count=count)
        self.retained, self.newest_version, self.newest_time = [], None, None
        self.resumed, self.problem = None, ""

    def _set_aside(self, version: int) -> None:
        assert self._snapshots is not None
        for path in self._snapshots.set_aside(version):
            log.warning("snapshot_set_aside", path=str(path))

    def find_newest(self) -> Manifest | None:
        """Return the newest valid snapshot of this job, or None."""
        return self._snapshots.newest_valid()[0] if self._snapshots is not None else None

    def newest_part(self) -> int | None:
        """Return the newest version of which the data directory has this shard's part, or None.

        The manifest may be in the directory of shard 0 only. Snapshots that were set aside do not
        count.
        """
        if self._data_dir is None:
            return None
        parts = self._data_dir.glob(f"snapshots/[0-9]*/shard-{self._shard}-of-*.safetensors")
        names = (part.parent.name for part in parts)
        return max((int(name) for name in names if name.isdecimal()), default=None)

    def find_before(self, version: int) -> Manifest | None:
        """Return the newest valid snapshot older than `version`, or None.

        The caller uses it if some shard could not load `version`.
        """
        assert self._snapshots is not None
        for older in reversed([v for v in self._snapshots.versions() if v < version]):
            if not self._snapshots.verify(older):
                return self._snapshots.manifest(older)
        return None

    def path(self, version: int) -> str:
        """Return the absolute path of a version's folder; empty without a data directory."""
        return str(self._snapshots.path(version).resolve()) if self._snapshots else ""

    def describe(self, manifest: Manifest | None, logged: bool = False) -> str:
        """Describe the snapshot to resume from, for the log.

        logged: a log is replayed after it.
        """
        if manifest is None:
            return f"the log in {self._data_dir}"
        log_text = " with its log" if logged else ""
        return f"the snapshot of version {manifest.version}{log_text} in {self._data_dir}"

    def reader(self, manifest: Manifest, shards: int) -> SnapshotReader:
        """Return a reader of this shard's partition of a snapshot, as one of `shards` shards."""
        if self._snapshots is None:
            raise SnapshotError(f"shard {self._shard} has no --data-dir")
        plan = PartitionPlan(manifest.model, shards)
        return SnapshotReader(
            self._snapshots, manifest, [plan.range(self._shard, role) for role in ROLES]
        )

    def note_loaded(self, manifest: Manifest | None) -> None:
        """Record which snapshot this shard continues from; None: from none."""
        self.newest_version = None
        if manifest is not None:
            self.newest_version = manifest.version
            own = manifest.parts[self._shard].nbytes if self._shard < manifest.shards else 0
            self._metrics.set_restored_snapshot(_written_at(manifest), own)

    # ---- writing ---------------------------------------------------------------------------------

    def write_part(
        self, cut: Cut, store: ParameterStore, report: Callable[[PartReport], None]
    ) -> None:
        """Copy the arrays now and write them in the background. Must not run during an update.

        report: called from the writing thread with the result.
        """
        if self._writer is not None:
            self._writer.join()
        if self._snapshots is None:  # shards with a data directory must not wait for this part
            report(PartReport(cut.version, cut.index, "", 0, "", "it has no --data-dir"))
            return
        self._exported = store.export(self._exported)
        groups, scalars = groups_to_json(store.groups()), scalars_to_json(store.scalars())
        args = (report, cut, store.plan.shards, store.steps(), groups, scalars)
        self._writer = threading.Thread(target=self._write, args=args, name="snapshot", daemon=True)
        self._writer.start()

    def _write(
        self,
        report: Callable[[PartReport], None],
        cut: Cut,
        shards: int,
        steps: dict[int, int],
        groups: str,
        scalars: str,
    ) -> None:
        assert self._snapshots is not None
        if sys.platform == "linux":  # elsewhere it would apply to the whole process
            os.nice(WRITER_NICENESS)
        began = time.monotonic()
        try:
            part = self._snapshots.write_part(
                cut.version, self._shard, shards, self._exported, steps, groups, scalars
            )
        except Exception as error:  # any error: the other shards must not wait for this part
            self._note_failure(error)
            report(PartReport(cut.version, cut.index, "", 0, "", self.problem))
            return
        self._metrics.record_snapshot(time.monotonic() - began, part.nbytes)
        report(PartReport(cut.version, cut.index, part.file, part.nbytes, part.sha256))

    def _note_failure(self, error: Exception) -> None:
        """Record a failure.

        Shard 0 logs it with the snapshot; an unexpected error is logged here.
        """
        is_expected = isinstance(error, SnapshotError)
        self.problem = str(error) if is_expected else f"a bug: {error!r}"
        cause = error.__cause__
        number = cause.errno if isinstance(cause, OSError) else None
        self._metrics.count_snapshot_failure(errno.errorcode.get(number or 0, "other"))
        if not is_expected:
            log.error("snapshot_part_failed", problem=self.problem, exc_info=error)

    def _log_failure(self, version: int) -> None:
        """Log that the snapshot of this version failed because of self.problem."""
        if self.logs_failures:
            log.error("snapshot_failed", version=version, problem=self.problem)
        self.failures += 1  # threads that wait for the snapshot poll this

    def commit(self, cutting: SnapshotInProgress, job: str, model: ModelSpec) -> Manifest | None:
        """Write the manifest after every shard has reported its part. Return None on failure."""
        assert self._snapshots is not None
        if cutting.problem:
            self.problem = cutting.problem
            self._metrics.count_snapshot_failure("incomplete")
            self._log_failure(cutting.version)
            return None
        manifest = self._manifest(cutting, job, model)
        try:
            self._snapshots.commit(manifest)
        except SnapshotError as error:
            self._note_failure(error)
            self._log_failure(cutting.version)
            return None
        self.generations.write_again()
        self.problem, self.newest_version, self.newest_time = "", cutting.version, time.time()
        log.info("snapshot_written", version=cutting.version)
        return manifest

    def prune(self) -> None:
        """Remove older snapshots, so that shards can remove older log segments."""
        assert self._snapshots is not None
        try:
            self._snapshots.prune(self._keep)
            self.retained = self._snapshots.versions()
        except SnapshotError as error:  # retried after the next snapshot
            log.warning("old_snapshots_not_removed", problem=str(error))

    def _manifest(self, cutting: SnapshotInProgress, job: str, model: ModelSpec) -> Manifest:
        parts = [cutting.parts[shard] for shard in sorted(cutting.parts)]
        return Manifest(
            job=job,
            version=cutting.version,
            index=cutting.index,
            shards=len(parts),
            created=datetime.now(UTC).isoformat(),
            model=model,
            parts=tuple(SnapshotPart(p.file, p.nbytes, p.sha256) for p in parts),
            coordinator=cutting.state,
            libraries={name: installed(name) for name in ("paramserver", "torch", "numpy")},
        )

    def retain(self, versions: Sequence[int], job: str) -> None:
        """Remove all parts except those of these versions, which the coordinator keeps."""
        if self._snapshots is not None and list(versions) != self.retained:
            self.retained = [*versions]
            with contextlib.suppress(SnapshotError):  # retried after the next snapshot
                self._snapshots.retain(versions, job)

    def listing(self) -> Iterator[dict[str, Any]]:
        """Yield the existing snapshots, for the status; none except on shard 0."""
        if self._snapshots is None:
            return
        for version in self._snapshots.versions():
            try:
                manifest = self._snapshots.manifest(version)
            except SnapshotError:
                continue
            yield {
                "version": version,
                "path": self.path(version),
                "nbytes": manifest.nbytes,
                "seconds": round(max(0.0, time.time() - _written_at(manifest)), 3),
            }

    def close(self) -> None:
        """Wait until the current part is written."""
        if self._writer is not None:
            self._writer.join()


def groups_of(store: ParameterStore | None) -> str:
    """Return the current hyper-parameters as JSON; empty before there are any."""
    return groups_to_json(store.groups()) if store is not None else ""


def _written_at(manifest: Manifest) -> float:
    return datetime.fromisoformat(manifest.created).timestamp()
