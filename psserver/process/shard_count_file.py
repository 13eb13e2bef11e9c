"""How many shards the job has, over all restarts: servers are started again with the command
line of before a move.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pscommon.core.errors import SnapshotError
from pscommon.snapshot.atomic_files import AtomicFiles, publish

log = logging.getLogger("psserver")


class ShardCountFile:
    """Kept by shard 0 in its data directory, where there is one.

    shards: of the job now. given: of the command line. changes: how often the number has
    changed. past: the numbers that it had before, and that command lines may still say.
    """

    def __init__(self, given: int, data_dir: Path | None) -> None:
        self.given = self.shards = given
        self.changes = 0
        self.past: set[int] = set()
        self._path = data_dir / "layout" if data_dir is not None else None
        if self._path is not None and self._path.exists():
            self._read(self._path)

    def _read(self, path: Path) -> None:
        """What was noted down counts for who is started as before; another number is what
        somebody wants now.
        """
        try:
            noted = json.loads(path.read_text())
            if self.given in (int(noted["shards"]), *noted["past"]):
                self._take(noted)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SnapshotError(
                f"{path} cannot be read: cannot tell how many servers the job had: {error}. "
                f"Try: rm {path}, and start as many servers as the newest snapshot has parts"
            ) from error

    def _take(self, noted: Mapping[str, Any]) -> None:
        past = {int(number) for number in noted["past"]}
        self.shards, self.past, self.changes = int(noted["shards"]), past, int(noted["changes"])

    @property
    def noted(self) -> dict[str, Any]:
        """All but the command line, JSON-ready."""
        return {"shards": self.shards, "past": sorted(self.past), "changes": self.changes}

    def forget(self) -> None:
        """A job begins that has no past."""
        self.shards, self.past, self.changes = self.given, set(), 0
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def change(self, shards: int) -> None:
        """The job has so many shards from now on. On the disk before this returns; OSError."""
        if shards != self.shards:
            new = self._changed(shards)
            self._write(new)
            self._take(new)

    def _changed(self, shards: int) -> dict[str, Any]:
        past = (self.past | {self.shards}) - {shards}
        return {"shards": shards, "past": sorted(past), "changes": self.changes + 1}

    def take_over(self, noted: Mapping[str, Any], shards: int) -> None:
        """Go on with what another process had noted; since then the job may have come to have so
        many shards.

        Where that cannot be written down the job goes on all the same: nobody else has it.
        """
        self._take(noted)
        if shards != self.shards:
            self._take(self._changed(shards))
        try:
            self._write(self.noted)
        except OSError as error:
            log.error("cannot note down how many servers there are", extra={"problem": str(error)})

    def _write(self, noted: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        files, temporary = AtomicFiles(), self._path.with_suffix(".tmp")
        files.write(temporary, json.dumps(noted).encode())
        publish(files, temporary, self._path)
