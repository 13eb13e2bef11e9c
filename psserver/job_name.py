"""The name of the job whose data lie in a data directory: what is not of that job may not touch them."""

import logging
from pathlib import Path

from pscommon.core.errors import SnapshotError
from pscommon.snapshot.files import Files, publish

log = logging.getLogger("psserver")


class JobName:
    """noted: the name that lies in the data directory; empty where there is none yet, or no data directory."""

    def __init__(self, data_dir: Path | None) -> None:
        self._path = data_dir / "job" if data_dir is not None else None
        try:
            self.noted = self._path.read_text() if self._path is not None and self._path.exists() else ""
        except (OSError, ValueError) as error:
            raise SnapshotError(f"{self._path}: cannot tell whose job's data these are: {error}") from error

    def note(self, job: str) -> None:
        """The data are of this job from now on. Where that cannot be written down the job goes on all the same."""
        if job == self.noted:
            return
        self.noted = job
        if self._path is not None:
            files, temporary = Files(), self._path.with_suffix(".tmp")
            try:
                files.write(temporary, job.encode())
                publish(files, temporary, self._path)
            except OSError as error:
                log.error("cannot note down the job's name", extra={"problem": str(error)})
