"""A shard's log and replication stream: pushes before they are reported, entries before they take
effect.

A segment begins with BASE, the machine's state (at a cut: that of the snapshot; later: that after
a restart), and with the pushes staged then. So the snapshot of a version, the last segment begun
at it, and all later segments together are the shard's state.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from pscommon.core.log_entries import Apply, Entry, Staged
from pscommon.core.model_spec import ModelSpec
from pscommon.optim.specs import groups_to_json
from pscommon.wal.log import LogDamagedError, Record, WriteAheadLog
from pscommon.wire.messages import (
    entry_from_proto,
    entry_to_proto,
    model_from_proto,
    model_to_proto,
    staged_from_proto,
    staged_to_proto,
)
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import log_pb2, model_pb2
from psserver.durability.best_effort_log import Raw
from psserver.durability.record_sink import RecordSink
from psserver.parameters.staging import Staging
from psserver.parameters.store import ParameterStore


class ShardRecordKind(IntEnum):
    """Type of a record."""

    BASE = 1
    MODEL = 2
    PUSH = 3
    ENTRY = 4


class HeldNumbers(NamedTuple):
    """Identifies the partition from before a reshard that other shards may still read.

    reshard: index of the Reshard entry.
    shards: number of shards before it.
    """

    reshard: int
    shards: int


class SegmentBase(NamedTuple):
    """The state at the begin of a segment.

    shards: number of shards.
    state: the machine's state.
    held: the partition from before a reshard that is kept for other shards.
    """

    shards: int
    state: dict[str, Any]
    held: HeldNumbers | None = None


class LoggedPush(NamedTuple):
    """A push as it was logged.

    payload: valid until the next record is read; empty if the push had a problem.
    """

    staged: Staged
    absent: Sequence[int]
    groups_json: str
    initial: bool
    payload: memoryview


Logged = SegmentBase | ModelSpec | LoggedPush | Entry


class ShardLog:
    """The log of one shard. Failures to write are not raised.

    On shard 0 a push is reported by a record of the coordinator, which follows the push in the same
    replication stream; so nothing here waits for the standby. On other shards `push` and
    `before_report` wait. Entries come from the coordinator, which keeps them until they are
    reported: they may be applied at once.
    """

    def __init__(self, records: RecordSink, shard: int = 0) -> None:
        self._waits_for_standby = shard > 0
        self._log = records

    @property
    def nbytes(self) -> int:
        """Bytes written since the last snapshot was begun."""
        return self._log.nbytes

    @property
    def broken(self) -> bool:
        """Whether something since the last snapshot could not be written."""
        return self._log.broken

    def begin(
        self, base: SegmentBase, model: ModelSpec | None, staged: Iterable[tuple[Staged, Staging]]
    ) -> None:
        """Begin a segment that follows this state."""
        self._log.begin(base.state["version"], self._first_records(base, model, staged))

    def _first_records(
        self, base: SegmentBase, model: ModelSpec | None, staged: Iterable[tuple[Staged, Staging]]
    ) -> Iterator[Raw]:
        yield base_record(base)
        if model is not None:
            yield model_record(model)
        for each, staging in staged:
            yield push_record(each, staging)

    def model(self, spec: ModelSpec) -> None:
        if not self._log.idle:
            self._log.append(*model_record(spec), settled=False)

    def push(self, staged: Staged, staging: Staging) -> None:
        """Log a push, before it is reported."""
        if not self._log.idle:
            self._log.append(*push_record(staged, staging), settled=self._waits_for_standby)

    def entry(self, entry: Entry) -> None:
        """Log an entry, before it is applied."""
        if not self._log.idle:
            self._log.append(
                ShardRecordKind.ENTRY, entry_to_proto(entry).SerializeToString(), settled=False
            )

    def before_report(self) -> None:
        """Return when the shard's progress may be reported."""
        if self._waits_for_standby:
            self._log.settle()

    def applied(self, version: int, store: ParameterStore) -> None:
        """Send the standby a checksum of the arrays at this version, while nothing is applied."""
        self._log.checksum(version, store)

    def moved(self) -> None:
        """Make the standby load the whole state: no record describes a new partition."""
        self._log.void("the model was resharded")

    def since(self, version: int | None) -> Iterator[Logged]:
        """Yield what was logged since a snapshot was cut; None: since the beginning.

        Raises LogDamagedError or OSError.
        """
        return map(logged, self._log.since(version))

    def retire(self, version: int) -> None:
        """Remove segments from before this version: a complete snapshot of it exists."""
        self._log.retire(version)

    def clear(self) -> None:
        """Remove all segments: the log that they are about is no longer followed."""
        self._log.clear()

    def close(self) -> None:
        self._log.close()


def folder_of(data_dir: Path, shard: int) -> Path:
    """Return the folder of a shard's log in a data directory."""
    return data_dir / f"log-shard-{shard}"


def logged_version(folder: Path) -> int:
    """Return the newest version in a shard's log on disk, up to any damage; 0 without a log."""
    version = 0
    with suppress(LogDamagedError, OSError, ValueError):
        log = WriteAheadLog(folder, "no")
        for name in log.segments()[-1:]:
            version = int(
                name.partition("-")[0]
            )  # segments are named by the version that they begin at
            for record in log.read(name):
                entry = logged(record)
                version = entry.version if isinstance(entry, Apply) else version
    return version


def base_record(base: SegmentBase) -> Raw:
    held = {"held": list(base.held) if base.held is not None else None}
    return (
        ShardRecordKind.BASE,
        json.dumps({"shards": base.shards, "state": base.state, **held}).encode(),
        (),
    )


def model_record(model: ModelSpec) -> Raw:
    return ShardRecordKind.MODEL, model_to_proto(model).SerializeToString(), ()


def push_record(staged: Staged, staging: Staging) -> Raw:
    header = log_pb2.LoggedPush(
        staged=staged_to_proto(staged),
        absent=sorted(staging.absent),
        groups_json=groups_to_json(staging.groups) if staging.groups is not None else "",
        initial=staging.initial,
    )
    return (
        ShardRecordKind.PUSH,
        header.SerializeToString(),
        () if staged.problem else staging.contents,
    )


def logged(record: Record) -> Logged:
    """Parse a record."""
    match ShardRecordKind(record.kind):
        case ShardRecordKind.BASE:
            raw = json.loads(record.header)
            return SegmentBase(
                raw["shards"], raw["state"], HeldNumbers(*raw["held"]) if raw["held"] else None
            )
        case ShardRecordKind.MODEL:
            return model_from_proto(model_pb2.ModelSpec.FromString(record.header))
        case ShardRecordKind.ENTRY:
            return entry_from_proto(co.Entry.FromString(record.header))
        case ShardRecordKind.PUSH:
            message = log_pb2.LoggedPush.FromString(record.header)
            staged = staged_from_proto(message.staged)
            return LoggedPush(
                staged, list(message.absent), message.groups_json, message.initial, record.payload
            )
