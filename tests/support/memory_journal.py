"""The commands of a coordinator in memory, encoded as on disk."""

import json

from psserver.core.commands.command import Command
from psserver.core.commands.recorded import RecordedCommand
from psserver.core.coordinator.machine import CoordinatorMachine


class MemoryJournal:
    """A journal in memory that a restart and a standby read; one segment is enough."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, command: Command[object], now: float) -> None:
        self.lines.append(json.dumps(RecordedCommand(command, now).as_json()))

    def rotate(self, coordinator: CoordinatorMachine) -> None: ...

    @property
    def commands(self) -> list[RecordedCommand]:
        return [RecordedCommand.from_json(json.loads(line)) for line in self.lines]
