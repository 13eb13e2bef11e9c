"""Data of simulated servers that survives their processes: snapshots, the logs of shards and of
the coordinator, and the records that standbys have received.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pscommon.core.log_entries import Apply, Cut, Reject
from pscommon.core.model_spec import ModelSpec
from pscommon.wal.log import Record
from psserver.durability.best_effort_log import Raw
from psserver.durability.record_sink import RecordSource
from psserver.durability.shard_log import ShardRecordKind, logged
from psserver.durability.state_records import StateRecord, StateRecordKind, about, checksum, copied


class MemoryLog:
    """Replaces BestEffortLog.

    segments: version and records of each segment.
    """

    nbytes, is_broken = 0, False

    def __init__(self) -> None:
        self.segments: list[tuple[int, list[Record]]] = []
        self.is_complete = False

    def begin_segment(self, version: int, records: Iterable[Raw]) -> None:
        self.segments.append((version, []))
        self.is_complete = True
        for record in records:
            self.append(*record)

    def append(self, kind: int, header: bytes, payload: Sequence[memoryview] = ()) -> None:
        if self.is_complete:
            self.segments[-1][1].append(Record(kind, header, memoryview(b"".join(payload))))

    def records_since(self, version: int | None) -> Iterator[Record]:
        segments = [each for each in self.segments if version is None or each[0] >= version]
        at_version = sum(first == version for first, _ in segments)
        for _, records in segments[max(0, at_version - 1) :]:
            yield from records

    def remove_before(self, version: int) -> None:
        remaining = [each for each in self.segments if each[0] >= version]
        self.segments = remaining or self.segments[-1:]

    def drop(self, count: int) -> None:
        """Remove the last records of the newest segment."""
        del self.segments[-1][1][-count:]

    def clear(self) -> None:
        self.segments.clear()
        self.is_complete = False


class SimStandby:
    """The records that a standby has received.

    acknowledged: number of records whose results other processes may know.
    lacks_records: records may be missing whose results other processes know, as after a promotion
        without --failover-lock.
    """

    def __init__(self, state: Iterable[StateRecord]) -> None:
        self.records = list(state)
        self.acknowledged = self._loaded = len(self.records)
        self.lacks_records = False

    def lose_newest(self, count: int) -> None:
        """Remove the newest records, as if they had not arrived when the primary was killed."""
        self.lacks_records = True
        del self.records[max(self._loaded, len(self.records) - count) :]

    def drop_unacknowledged(self, rng: random.Random) -> int:
        """Remove some of the newest entries, whose results no other process knows.

        Returns:
            The number of removed entries.
        """
        dropped = 0
        while len(self.records) > self.acknowledged and rng.random() < 0.5:
            record = self.records[-1]
            if record.source is RecordSource.SHARD:
                if record.kind != ShardRecordKind.ENTRY or isinstance(
                    logged(Record(record.kind, record.header, memoryview(b""))), Cut
                ):
                    break
                dropped += 1
            del self.records[-1]
        return dropped


@dataclass
class Disk:
    """Data of one server that survives its process.

    parts: version and weights of each snapshot part, by index of the Cut.
    standby: standby of the server; None without one.
    """

    parts: dict[int, tuple[int, list[float]]] = field(default_factory=dict)
    shard_log: MemoryLog = field(default_factory=MemoryLog)
    job_log: MemoryLog = field(default_factory=MemoryLog)
    standby: SimStandby | None = None


class SimLink:
    """Replaces the connection of a primary to its standby."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    @property
    def has_standby(self) -> bool:
        return self._disk.standby is not None

    @property
    def last_position(self) -> int:
        return len(self._disk.standby.records) if self._disk.standby is not None else 0

    def send(
        self, source: RecordSource, kind: int, header: bytes, payload: Sequence[memoryview]
    ) -> int:
        if self._disk.standby is not None:
            self._disk.standby.records.append(copied(source, kind, header, payload))
        return self.last_position

    def wait_for_standby(self, sent: int) -> None:
        if self._disk.standby is not None:
            self._disk.standby.acknowledged = max(self._disk.standby.acknowledged, sent)

    def reset(self, reason: str) -> None:
        self._disk.standby = None

    def send_checksum(self, version: int, store: Any) -> None:
        if self._disk.standby is not None:
            self._disk.standby.records.append(
                about(StateRecordKind.CHECKSUM, version=version, checksum=checksum(store))
            )


@dataclass
class SimManifest:
    """A complete snapshot; replaces its Manifest.

    coordinator: state of the coordinator.
    updates, rejections: entries before the snapshot, for the checks.
    """

    version: int
    index: int
    coordinator: dict[str, Any]
    model: ModelSpec
    shards: int
    updates: tuple[Apply, ...]
    rejections: tuple[Reject, ...]
    job: str = "simulated"
