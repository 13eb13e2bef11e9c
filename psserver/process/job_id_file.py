"""The name of the job whose data lie in a data directory: what is not of that job may not touch
them.
"""

import logging
import re
import secrets
from pathlib import Path

from pscommon.core.errors import MismatchError, SnapshotError
from pscommon.snapshot.atomic_files import AtomicFiles, publish

MADE_UP = re.compile("job-[0-9a-f]{8}")

log = logging.getLogger("psserver")


def made_up() -> str:
    """A name for a job that nobody has named."""
    return f"job-{secrets.token_hex(4)}"


class JobIdFile:
    """noted: the name that lies in the data directory; empty where there is none yet, or no data
    directory.
    """

    def __init__(self, data_dir: Path | None) -> None:
        self._path = data_dir / "job" if data_dir is not None else None
        try:
            self.noted = (
                self._path.read_text() if self._path is not None and self._path.exists() else ""
            )
        except (OSError, ValueError) as error:
            raise SnapshotError(
                f"{self._path} cannot be read: cannot tell whose job's data these are: {error}. "
                f"Try: rm {self._path}, and start the server with --job and the job's name"
            ) from error

    def check(self, job: str) -> None:
        """MismatchError where the data are of a job of another name; one that was made up gives
        way.
        """
        if self.noted not in ("", job) and not MADE_UP.fullmatch(self.noted):
            assert self._path is not None
            raise MismatchError(
                f"the data in {self._path.parent} are of job {self.noted}, not {job}: give --job "
                f"{self.noted}, or "
                "another --data-dir; --resume never begins a new job there, and keeps the old "
                "one's snapshots aside",
                "JOB_MISMATCH",
            )

    def note(self, job: str) -> None:
        """The data are of this job from now on. Where that cannot be written down the job goes
        on all the same.
        """
        if job == self.noted:
            return
        self.noted = job
        if self._path is not None:
            files, temporary = AtomicFiles(), self._path.with_suffix(".tmp")
            try:
                files.write(temporary, job.encode())
                publish(files, temporary, self._path)
            except OSError as error:
                log.error("cannot note down the job's name", extra={"problem": str(error)})
