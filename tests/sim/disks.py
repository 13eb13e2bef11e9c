"""What survives a server of the simulated world: snapshots, and the logs of the shard and of the
coordinator.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from pscommon.core.log_entries import Apply, PushKey, Reject
from psserver.core.commands.recorded import RecordedCommand
from psserver.core.coordinator.machine import CoordinatorMachine
from tests.sim.mirror import Mirror

History = list[tuple[PushKey, ...]]


@dataclass
class Segment:
    """A stretch of a log: the state that it goes on from, and what came then.

    held: in a move, the index of the Reshard and how many shards there were before it.
    """

    version: int
    base: str
    records: list[Any] = field(default_factory=list)
    shards: int = 0
    held: tuple[int, int] | None = None

    @property
    def index(self) -> int:
        """Of the log, where it begins."""
        return int(json.loads(self.base).get("index", 0))


@dataclass
class Disk:
    """What survives a server. parts: by index of the cut, its weights and the history of this
    version; log and job: of the shard and the coordinator. mirror: its standby, if it has one."""

    parts: dict[int, tuple[list[float], History]] = field(default_factory=dict)
    log: list[Segment] = field(default_factory=list)
    job: list[Segment] = field(default_factory=list)
    mirror: Mirror | None = None

    def goes_on_from(self, saved: "Saved | None") -> bool:
        """Does what the coordinator has written follow this snapshot, or nothing?"""
        segments = since(self.job, saved.version if saved else None)
        return bool(segments) and (saved is not None or "index" not in json.loads(segments[0].base))


def since(log: list[Segment], version: int | None) -> list[Segment]:
    """What was written since a snapshot; of the segments that were begun at its version only the
    last.
    """
    if version is None:
        return log
    older = [segment for segment in log if segment.version <= version]
    return [*older[-1:], *log[len(older) :]] if older and older[-1].version == version else []


@dataclass
class Saved:
    """A complete snapshot: what the manifest says."""

    version: int
    index: int
    state: str
    shards: int
    decided: tuple[Apply, ...]
    dropped: tuple[Reject, ...]


class JobJournal:
    """The coordinator's part of a disk."""

    def __init__(self, disk: Disk, log_id: int, shards: int) -> None:
        self.disk = disk
        self.begin(0, {"epoch": log_id}, shards)

    def begin(self, version: int, state: dict[str, Any], shards: int) -> None:
        """What was written before is void."""
        self.disk.job = [Segment(version, json.dumps(state), [], shards)]

    def write(self, command: RecordedCommand) -> None:
        self.disk.job[-1].records.append(json.dumps(command.as_json()))
        if self.disk.mirror is not None:
            self.disk.mirror.tell("command", json.dumps(command.as_json()))

    def rotate(self, coordinator: CoordinatorMachine) -> None:
        """A new segment goes on from here."""
        self.disk.job.append(
            Segment(
                coordinator.version,
                json.dumps(coordinator.complete_state()),
                [],
                coordinator.shards,
            )
        )
