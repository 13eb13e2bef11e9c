"""The number of shards of the job, on disk: servers restart with command lines from before a
reshard.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pscommon.core.errors import SnapshotError
from pscommon.snapshot.atomic_files import AtomicFiles, publish
from pscommon.telemetry.logs import get_logger

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
        if self._path is None:
            return
        files, temporary = AtomicFiles(), self._path.with_suffix(".tmp")
        files.write(temporary, json.dumps(stored).encode())
        publish(files, temporary, self._path)
