"""The coordinator's log and replication stream: every command, before its result is visible."""

import json
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any

from pscommon.telemetry.logs import get_logger
from psserver.core.commands.command import Command
from psserver.core.commands.recorded import RecordedCommand
from psserver.core.commands.recorder import replay
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.durability.record_sink import RecordSink, RecordSource

log = get_logger(__name__)


LOG_FOLDER = "log-job"
"""Folder of the log in the data directory."""


class CoordinatorRecordKind(IntEnum):
    """Type of a record, whose header is JSON.

    BASE: the coordinator's state.
    COMMAND: a command.
    """

    BASE = 1
    COMMAND = 2


class CoordinatorLog(RecordSink):
    """The coordinator's log (implements CommandJournal)."""

    source = RecordSource.JOB

    def write(self, command: Command[object], now: float) -> None:
        if not self.is_idle:
            recorded = json.dumps(RecordedCommand(command, now).as_json()).encode()
            self.append(CoordinatorRecordKind.COMMAND, recorded)

    def rotate(self, coordinator: CoordinatorMachine) -> None:
        self.begin_segment(coordinator.job.version, coordinator.complete_state())

    def begin_segment(self, version: int, state: Mapping[str, Any]) -> None:
        """Begin a segment with this state, which has at least job and log id (key "epoch")."""
        self.begin_records(version, [(CoordinatorRecordKind.BASE, json.dumps(state).encode(), ())])

    def records_since(self, version: int | None) -> Iterator[dict[str, Any] | RecordedCommand]:
        """Yield states and commands, as `read_records` does."""
        for record in self.read_records(version):
            raw = json.loads(record.header)
            yield (
                raw if record.kind == CoordinatorRecordKind.BASE else RecordedCommand.from_json(raw)
            )

    @staticmethod
    def replay(coordinator: CoordinatorMachine, command: RecordedCommand) -> None:
        """Replay a recorded command; an unexpected error that it raised before is logged."""
        replay(coordinator, [command], _log_failed_command)


def _log_failed_command(recorded: RecordedCommand, error: Exception) -> None:
    name = recorded.command.wire_name
    log.warning("recorded_command_failed", command=name, problem=repr(error))
