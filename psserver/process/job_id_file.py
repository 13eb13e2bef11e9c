"""The name of the job that owns a data directory: another job must not touch it."""

import re
import secrets
from pathlib import Path

from pscommon.core.errors import MismatchError, SnapshotError
from pscommon.snapshot.atomic_files import AtomicFiles, publish
from pscommon.telemetry.logs import get_logger

GENERATED_NAME = re.compile("job-[0-9a-f]{8}")

log = get_logger(__name__)


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
        """Check that the data belong to this job. A generated name gives way to any other.

        Raises:
            MismatchError: The data belong to a job of another name.
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
            files, temporary = AtomicFiles(), self._path.with_suffix(".tmp")
            try:
                files.write(temporary, job.encode())
                publish(files, temporary, self._path)
            except OSError as error:
                log.error("job_name_not_stored", problem=str(error))
