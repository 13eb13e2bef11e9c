"""The names of the job's trainings on disk, for a start of the servers before a training has its
first snapshot or log.
"""

import json
from pathlib import Path

from pscommon.core.errors import SnapshotError
from pscommon.snapshot.atomic_files import AtomicFiles, publish
from pscommon.telemetry.logs import get_logger
from psserver.core.job.trainings import Trainings

log = get_logger(__name__)


class TrainingsFile:
    """Stored by shard 0 in its data directory, if there is one, when a later training begins."""

    def __init__(self, data_dir: Path | None) -> None:
        self._path = data_dir / "trainings" if data_dir is not None else None

    def read(self, forget: bool) -> Trainings:
        """Return the stored names.

        forget: Remove them first: a job begins without earlier state.

        Raises:
            SnapshotError: The file is damaged.
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
            files, temporary = AtomicFiles(), self._path.with_suffix(".tmp")
            try:
                files.write(temporary, json.dumps(trainings.as_json()).encode())
                publish(files, temporary, self._path)
            except OSError as error:
                log.error("trainings_not_stored", problem=str(error))
