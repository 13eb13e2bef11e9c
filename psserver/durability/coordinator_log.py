"""The coordinator's log and replication stream: every command, before its result is visible."""

import json
import logging
from collections.abc import Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from pscommon.core.errors import InvalidRequestError
from pscommon.snapshot import Manifest
from psserver.core.commands.recorder import RecordedCommand, replay
from psserver.core.job.coordinator import CoordinatorMachine
from psserver.durability.record_sink import RecordSink
from psserver.durability.shard_state import LogUnfitError

log = logging.getLogger("psserver")


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
    def broken(self) -> bool:
        """Whether some record since the last snapshot could not be written."""
        return self._log.broken

    def write(self, command: RecordedCommand) -> None:
        if not self._log.idle:
            self._log.append(CoordinatorRecordKind.COMMAND, json.dumps(command.as_json()).encode())

    def rotate(self, coordinator: CoordinatorMachine) -> None:
        self.begin(coordinator.version, coordinator.whole())

    def begin(self, version: int, state: Mapping[str, Any]) -> None:
        """Begin a segment with this state, which has at least job and epoch."""
        self._log.begin(version, [(CoordinatorRecordKind.BASE, json.dumps(state).encode(), ())])

    def since(self, version: int | None) -> Iterator[dict[str, Any] | RecordedCommand]:
        """Yield states and commands since a snapshot was cut; None: since the job began.

        Raises:
            LogDamagedError: A segment is damaged.
            OSError: A segment cannot be read.
        """
        for record in self._log.since(version):
            raw = json.loads(record.header)
            yield (
                raw if record.kind == CoordinatorRecordKind.BASE else RecordedCommand.from_json(raw)
            )

    @staticmethod
    def replay(coordinator: CoordinatorMachine, command: RecordedCommand) -> None:
        """Replay a recorded command; an unexpected error that it raised before is logged."""
        replay(coordinator, [command], _log_failed_command)

    def retire(self, version: int) -> None:
        """Remove segments older than this version, of which a complete snapshot exists."""
        self._log.retire(version)

    def clear(self) -> None:
        """Remove all segments: the job has ended."""
        self._log.clear()

    def close(self) -> None:
        self._log.close()


def is_before(note: Mapping[str, Any] | RecordedCommand, manifest: Manifest) -> bool:
    """Return whether a record at the snapshot's version was written before the snapshot was cut.

    This happens if a reshard ended with the snapshot.
    """
    return isinstance(note, RecordedCommand) or (
        note["version"] == manifest.version and note.get("index", manifest.index) < manifest.index
    )


def check_nothing_more(version: int, manifest: Manifest | None, where: str, remedy: str) -> None:
    """Check that an unusable log has no updates that every snapshot lacks.

    Args:
        version: Version at which the log ends.
        manifest: The newest snapshot; None without one.
        where: The log, for the message.
        remedy: A remedy, for the message.

    Raises:
        InvalidRequestError: The log has newer updates than the snapshot.
    """
    saved = manifest.version if manifest else 0
    if version > saved:
        raise InvalidRequestError(
            f"updates {saved + 1} to {version} are in no snapshot, but in {where}: {remedy}; "
            f"or give these updates up with --resume {saved if manifest else 'never'}"
        )


def report_unusable(problem: str, folder: Path, saved: int, reached: int) -> None:
    """Log that the job continues from version `saved`, although a log reaches another version.

    Args:
        problem: Why the log is unusable; empty if the coordinator's log has no record since that
            version but shard 0's log has.
        folder: The log's folder.
        saved: Version that the job continues from.
        reached: Version at which the log ends.
    """
    missing = f"{folder} holds nothing since version {saved}: files of it are missing"
    extra = {
        "problem": problem or missing,
        "version": saved,
        "updates_lost": max(0, reached - saved),
    }
    log.error("the log cannot be used", extra=extra)


def check_begins(note: Mapping[str, Any] | RecordedCommand, manifest: Manifest | None) -> None:
    """Raise LogUnfitError unless the first segment continues the snapshot, or an empty state."""
    if isinstance(note, RecordedCommand):
        raise LogUnfitError("it does not begin with a state")
    version = manifest.version if manifest else 0
    if note["version"] != version:
        raise LogUnfitError(f"it begins at version {note['version']}, the snapshot is of {version}")
    if "log" in note and manifest is None:
        raise LogUnfitError("it goes on from a state of which there is no snapshot")


def check_goes_on(note: Mapping[str, Any], coordinator: CoordinatorMachine) -> None:
    """Raise LogUnfitError unless a segment begins where the commands before it ended."""
    state = json.loads(json.dumps(coordinator.state()))
    if differing := [key for key in state if note.get(key) != state[key]]:
        raise LogUnfitError(
            f"commands before version {note.get('version')} are missing: {', '.join(differing)}"
        )


def _log_failed_command(command: RecordedCommand, error: Exception) -> None:
    extra = {"command": command.name, "problem": repr(error)}
    log.warning("a recorded command fails as it did before; going on after it", extra=extra)
