"""What the coordinator writes down (--durability log) and what its standby is told: every command, before anybody
learns what came of it."""

import json
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any

from psserver.core.coordinator import Coordinator
from psserver.core.recorder import Command
from psserver.records import Records


class Kind(IntEnum):
    """What a record is; each is JSON."""

    BASE = 1
    COMMAND = 2


class JobJournal:
    """The coordinator's log (core/recorder.py: Journal). Failures to write are not raised."""

    def __init__(self, records: Records) -> None:
        self._log = records

    @property
    def broken(self) -> bool:
        """Something since the last snapshot could not be written."""
        return self._log.broken

    def write(self, command: Command) -> None:
        if not self._log.idle:
            self._log.append(Kind.COMMAND, json.dumps(command.as_json()).encode())

    def rotate(self, coordinator: Coordinator) -> None:
        self.begin(coordinator.version, coordinator.whole())

    def begin(self, version: int, state: Mapping[str, Any]) -> None:
        """A new segment, for what follows on this state; it names at least job and epoch."""
        self._log.begin(version, [(Kind.BASE, json.dumps(state).encode(), ())])

    def since(self, version: int | None) -> Iterator[dict[str, Any] | Command]:
        """States and commands since a snapshot was cut; None: since the beginning. LogDamagedError, OSError."""
        for record in self._log.since(version):
            raw = json.loads(record.header)
            yield raw if record.kind == Kind.BASE else Command.from_json(raw)

    def retire(self, version: int) -> None:
        """There is a snapshot of this version."""
        self._log.retire(version)

    def clear(self) -> None:
        """The job of before is over."""
        self._log.clear()

    def close(self) -> None:
        self._log.close()
