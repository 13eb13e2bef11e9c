"""What a data directory keeps of its job beside snapshots and logs: the number of shards, because
servers restart with command lines from before a reshard; the names of the trainings, for a start
before a training has its first snapshot or log; the name of the job, because another job must
not touch the directory; and the job's key, so that workers stay known.
"""

import json
import re
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pscommon.core.errors import MismatchError, SnapshotError
from pscommon.security.secret_files import SECRET_MODE_BITS, read_file
from pscommon.snapshot.atomic_files import AtomicFiles, publish
from pscommon.telemetry.logs import get_logger
from psserver.core.job.trainings import Trainings
from psserver.process.worker_keys import JOB_KEY_BYTES

GENERATED_NAME = re.compile("job-[0-9a-f]{8}")

log = get_logger(__name__)


class ShardCountFile:
    """Stored by shard 0 in its data directory, if there is one.

    Attributes:
        shards: Current number.
        configured: Number on the command line.
        changes: How often the number has changed.
        past: Earlier numbers, which command lines may still contain.
    """

    def __init__(self, configured: int, data_dir: Path | None) -> None:
        self.configured = self.shards = configured
        self.changes = 0
        self.past: set[int] = set()
        self._path = data_dir / "layout" if data_dir is not None else None
        if self._path is not None and self._path.exists():
            self._read(self._path)

    def _read(self, path: Path) -> None:
        """Read the file. It counts only if the number on the command line is one of its numbers."""
        try:
            stored = json.loads(path.read_text())
            if self.configured in (int(stored["shards"]), *stored["past"]):
                self._take(stored)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SnapshotError(
                f"{path} cannot be read: the number of servers is unknown: {error}. "
                f"Try: `rm {path}`, and start as many servers as the newest snapshot has parts"
            ) from error

    def _take(self, stored: Mapping[str, Any]) -> None:
        past = {int(number) for number in stored["past"]}
        self.shards, self.past, self.changes = int(stored["shards"]), past, int(stored["changes"])

    @property
    def stored_values(self) -> dict[str, Any]:
        """All values but the one from the command line, for JSON."""
        return {"shards": self.shards, "past": sorted(self.past), "changes": self.changes}

    def forget(self) -> None:
        """Remove the file: a job begins without earlier state."""
        self.shards, self.past, self.changes = self.configured, set(), 0
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def change(self, shards: int) -> None:
        """Set the number of shards; it is on the disk when this returns. Raises OSError."""
        if shards != self.shards:
            new = self._changed(shards)
            self._write(new)
            self._take(new)

    def _changed(self, shards: int) -> dict[str, Any]:
        past = (self.past | {self.shards}) - {shards}
        return {"shards": shards, "past": sorted(past), "changes": self.changes + 1}

    def take_over(self, stored: Mapping[str, Any], shards: int) -> None:
        """Continue with the values of another process, then set the number of shards.

        If the disk refuses, the job continues nevertheless: no other process has its state.
        """
        self._take(stored)
        if shards != self.shards:
            self._take(self._changed(shards))
        try:
            self._write(self.stored_values)
        except OSError as error:
            log.error("shard_count_not_stored", problem=str(error))

    def _write(self, stored: Mapping[str, Any]) -> None:
        if self._path is not None:
            _replace(self._path, json.dumps(stored))


class TrainingsFile:
    """Stored by shard 0 in its data directory, if there is one, when a later training begins."""

    def __init__(self, data_dir: Path | None) -> None:
        self._path = data_dir / "trainings" if data_dir is not None else None

    def read(self, forget: bool) -> Trainings:
        """Return the stored names. Raises SnapshotError if the file is damaged.

        forget: Remove them first: a job begins without earlier state.
        """
        if self._path is not None and forget:
            self._path.unlink(missing_ok=True)
        if self._path is None or not self._path.exists():
            return Trainings()
        try:
            return Trainings.from_json(json.loads(self._path.read_text()))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise SnapshotError(
                f"{self._path} cannot be read: it is unknown which trainings are over: {error}. "
                f"Try: `rm {self._path}`; finished trainings are then made again"
            ) from error

    def store(self, trainings: Trainings) -> None:
        """Write the names. If the disk refuses, the job continues nevertheless."""
        if self._path is not None:
            try:
                _replace(self._path, json.dumps(trainings.as_json()))
            except OSError as error:
                log.error("trainings_not_stored", problem=str(error))


def generate_job_name() -> str:
    """Return a name for a job without one."""
    return f"job-{secrets.token_hex(4)}"


class JobIdFile:
    """The file with the name of the job.

    Attributes:
        stored_job: The name in the file; empty without a file or a data directory.
    """

    def __init__(self, data_dir: Path | None) -> None:
        self._path = data_dir / "job" if data_dir is not None else None
        try:
            self.stored_job = (
                self._path.read_text() if self._path is not None and self._path.exists() else ""
            )
        except (OSError, ValueError) as error:
            raise SnapshotError(
                f"{self._path} cannot be read: cannot tell whose job's data these are: {error}. "
                f"Try: rm {self._path}, and start the server with --job and the job's name"
            ) from error

    def check(self, job: str) -> None:
        """Raise MismatchError if the data belong to another job. A generated name gives way to any
        other.
        """
        if self.stored_job not in ("", job) and not GENERATED_NAME.fullmatch(self.stored_job):
            assert self._path is not None
            raise MismatchError(
                f"data directory {self._path.parent} belongs to job {self.stored_job}, not {job}. "
                f"Try: `--job {self.stored_job}`, another `--data-dir`, or `--resume never` to "
                f"start over (existing snapshots are moved aside)",
                "JOB_MISMATCH",
            )

    def store(self, job: str) -> None:
        """Write the job's name. If the disk refuses, the job continues nevertheless."""
        if job == self.stored_job:
            return
        self.stored_job = job
        if self._path is not None:
            try:
                _replace(self._path, job)
            except OSError as error:
                log.error("job_name_not_stored", problem=str(error))


def stored_job_key(data_dir: Path | None, key: bytes, shard: int = 0) -> bytes:
    """Return the job's key in the data directory of a shard; without one, store this key.

    If the disk refuses, the job continues nevertheless: after a restart its workers join again.

    Raises:
        SnapshotError: The file is damaged.
        InvalidRequestError: It cannot be read, or others can read it.
    """
    if data_dir is None:
        return key
    path = data_dir / _job_key_name(shard)
    if not path.exists():
        if key:
            store_job_key(data_dir, key)
        return key
    with suppress(OSError):  # Kubernetes opens files to the group of a volume (fsGroup)
        path.chmod(path.stat().st_mode & ~stat.S_IRWXG)
    text = read_file(path, "job key", "ps-server --data-dir")
    try:
        stored = bytes.fromhex(text.decode())
    except ValueError:
        stored = b""
    if len(stored) != JOB_KEY_BYTES:
        raise SnapshotError(
            f"{path} is damaged: the key of the job is unknown. Try: `rm {path}`; workers that are "
            "running join again"
        )
    return stored


def store_job_key(data_dir: Path | None, key: bytes, shard: int = 0) -> None:
    """Write the job's key to the data directory of a shard, if there is one."""
    if data_dir is not None:
        try:
            _replace(data_dir / _job_key_name(shard), key.hex(), SECRET_MODE_BITS)
        except OSError as error:
            log.error("job_key_not_stored", problem=str(error))


def _job_key_name(shard: int) -> str:
    """Return the name of a shard's file: shards may share their data directory."""
    return f"job-key-{shard}" if shard else "job-key"


def _replace(path: Path, text: str, mode: int = 0o666) -> None:
    """Replace a file; it is on the disk when this returns. Raises OSError.

    mode: Of the new file, less the umask.
    """
    files, temporary = AtomicFiles(), path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    temporary.touch(mode)  # before it has content
    files.write(temporary, text.encode())
    publish(files, temporary, path)
