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
from psserver.durability.record_sink import RecordSink

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


class CoordinatorLog:
    """The coordinator's log (implements CommandJournal). Write failures are not raised."""

    def __init__(self, records: RecordSink) -> None:
        self._log = records

    @property
    def is_broken(self) -> bool:
        """Whether some record since the last snapshot could not be written."""
        return self._log.is_broken

    def write(self, command: Command[object], now: float) -> None:
        if not self._log.is_idle:
            recorded = json.dumps(RecordedCommand(command, now).as_json()).encode()
            self._log.append(CoordinatorRecordKind.COMMAND, recorded)

    def rotate(self, coordinator: CoordinatorMachine) -> None:
        self.begin_segment(coordinator.version, coordinator.complete_state())

    def begin_segment(self, version: int, state: Mapping[str, Any]) -> None:
        """Begin a segment with this state, which has at least job and log id (key "epoch")."""
        self._log.begin_segment(
            version, [(CoordinatorRecordKind.BASE, json.dumps(state).encode(), ())]
        )

    def records_since(self, version: int | None) -> Iterator[dict[str, Any] | RecordedCommand]:
        """Yield states and commands since a snapshot was cut; None: since the job began.

        Raises:
            LogDamagedError: A segment is damaged.
            OSError: A segment cannot be read.
        """
        for record in self._log.records_since(version):
            raw = json.loads(record.header)
            yield (
                raw if record.kind == CoordinatorRecordKind.BASE else RecordedCommand.from_json(raw)
            )

    @staticmethod
    def replay(coordinator: CoordinatorMachine, command: RecordedCommand) -> None:
        """Replay a recorded command; an unexpected error that it raised before is logged."""
        replay(coordinator, [command], _log_failed_command)

    def remove_before(self, version: int) -> None:
        """Remove segments older than this version, of which a complete snapshot exists."""
        self._log.remove_before(version)

    def clear(self) -> None:
        """Remove all segments: the job has ended."""
        self._log.clear()

    def close(self) -> None:
        self._log.close()


def _log_failed_command(recorded: RecordedCommand, error: Exception) -> None:
    name = recorded.command.wire_name
    log.warning("recorded_command_failed", command=name, problem=repr(error))
