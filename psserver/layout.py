"""How many shards the job has, over all restarts: servers are started again with the command line of before a move."""

import json
from pathlib import Path

from pscommon.core.errors import SnapshotError
from pscommon.snapshot.files import Files, publish


class Layout:
    """Kept by shard 0 in its data directory, where there is one.

    shards: of the job now. given: of the command line. changes: how often the number has changed. past: the numbers
    that it had before, and that command lines may still say.
    """

    def __init__(self, given: int, data_dir: Path | None) -> None:
        self.given = self.shards = given
        self.changes = 0
        self.past: set[int] = set()
        self._path = data_dir / "layout" if data_dir is not None else None
        if self._path is not None and self._path.exists():
            self._take(self._path)

    def _take(self, path: Path) -> None:
        """What was noted down counts for who is started as before; another number is what somebody wants now."""
        try:
            noted = json.loads(path.read_text())
            shards, past, changes = (
                int(noted["shards"]),
                {int(number) for number in noted["past"]},
                int(noted["changes"]),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SnapshotError(f"{path}: cannot tell how many servers the job had: {error}") from error
        if self.given == shards or self.given in past:
            self.shards, self.past, self.changes = shards, past, changes

    def forget(self) -> None:
        """A job begins that has no past."""
        self.shards, self.past, self.changes = self.given, set(), 0
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def change(self, shards: int) -> None:
        """The job has so many shards from now on. On the disk before this returns; OSError."""
        if shards == self.shards:
            return
        past = (self.past | {self.shards}) - {shards}
        if self._path is not None:
            _write(self._path, {"shards": shards, "past": sorted(past), "changes": self.changes + 1})
        self.shards, self.past, self.changes = shards, past, self.changes + 1


def _write(path: Path, noted: dict[str, object]) -> None:
    files, temporary = Files(), path.with_suffix(".tmp")
    files.write(temporary, json.dumps(noted).encode())
    publish(files, temporary, path)
