"""A shard's log and replication stream: pushes before they are reported, and log entries.

A segment begins with BASE, the state of the shard's state machine, and with the pushes staged at
that time. At a cut this is the snapshot's state, otherwise the state after a restart. So the
snapshot of a version, the last segment begun at that version and all later segments are together
the shard's state.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from pscommon.core.log_entries import Apply, Entry, Staged
from pscommon.core.model_spec import ModelSpec
from pscommon.wal.log import LogDamagedError, Record, WriteAheadLog
from pscommon.wire.messages import (
    entry_from_proto,
    entry_to_proto,
    model_from_proto,
    model_to_proto,
    staged_from_proto,
    staged_to_proto,
)
from pscommon.wire.push import Part, parts_from_proto, parts_to_proto
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import log_pb2, model_pb2
from psserver.durability.best_effort_log import BestEffortLog, Raw
from psserver.durability.record_sink import RecordSink, RecordSource, StandbyLink
from psserver.parameters.staging import Staging


class ShardRecordKind(IntEnum):
    """Type of a record.

    BASE: state of the state machine at the start of a segment.
    MODEL: the model.
    PUSH: a staged push.
    ENTRY: a log entry.
    """

    BASE = 1
    MODEL = 2
    PUSH = 3
    ENTRY = 4


class FrozenNumbers(NamedTuple):
    """Id of the previous partition that other shards may still read after a reshard.

    reshard: index of the Reshard entry.
    shards: number of shards before it.
    """

    reshard: int
    shards: int


class SegmentBase(NamedTuple):
    """State at the start of a segment.

    shards: number of shards.
    state: state of the state machine.
    frozen: the previous partition that is kept for other shards.
    """

    shards: int
    state: dict[str, Any]
    frozen: FrozenNumbers | None = None


class LoggedPush(NamedTuple):
    """A push as it was logged.

    staged: the report of the push.
    absent: indices of tensors without a gradient.
    groups_json: hyper-parameters that came with the push, as JSON; empty if none did.
    initial: whether it contains the initial weights.
    payload: valid until the next record is read; empty if the push had a problem.
    has_own_groups: whether its hyper-parameters count for it alone, see PushGroups.
    parts: the parts that it names, in whose order the payload is; empty: none.
    """

    staged: Staged
    absent: Sequence[int]
    groups_json: str
    initial: bool
    payload: memoryview
    has_own_groups: bool = False
    parts: tuple[Part, ...] = ()


Logged = SegmentBase | ModelSpec | LoggedPush | Entry


class ShardLog(RecordSink):
    """The log of one shard.

    On shard 0 a coordinator record reports a push; it follows the push in the same replication
    stream, so nothing here waits for the standby. On other shards `write_push` and
    `wait_before_report` wait for it. The coordinator keeps entries until they are reported, so they
    may be applied at once.
    """

    source = RecordSource.SHARD

    def __init__(
        self, shard: int = 0, log: BestEffortLog | None = None, line: StandbyLink | None = None
    ) -> None:
        super().__init__(log, line)
        self._waits_for_standby = shard > 0

    def begin_segment(
        self, base: SegmentBase, model: ModelSpec | None, staged: Iterable[tuple[Staged, Staging]]
    ) -> None:
        """Begin a segment with this state."""
        self.begin_records(base.state["version"], self._first_records(base, model, staged))

    def _first_records(
        self, base: SegmentBase, model: ModelSpec | None, staged: Iterable[tuple[Staged, Staging]]
    ) -> Iterator[Raw]:
        yield base_record(base)
        if model is not None:
            yield model_record(model)
        for each, staging in staged:
            yield push_record(each, staging)

    def write_model(self, spec: ModelSpec) -> None:
        if not self.is_idle:
            self.append(*model_record(spec), settled=False)

    def write_push(self, staged: Staged, staging: Staging) -> None:
        """Log a push, before it is reported."""
        if not self.is_idle:
            self.append(
                *push_record(staged, staging),
                settled=self._waits_for_standby,
                pushes=(staged.key,),
            )

    def write_entry(self, entry: Entry) -> None:
        """Log an entry, before it is applied."""
        if not self.is_idle:
            self.append(
                ShardRecordKind.ENTRY, entry_to_proto(entry).SerializeToString(), settled=False
            )

    def wait_before_report(self) -> None:
        """Wait until the shard's progress may be reported."""
        if self._waits_for_standby:
            self.wait_for_standby()

    def records_since(self, version: int | None) -> Iterator[Logged]:
        """Yield what was logged, as `read_records` does."""
        return map(logged, self.read_records(version))


def folder_of(data_dir: Path, shard: int) -> Path:
    """Return the folder of a shard's log in a data directory."""
    return data_dir / f"log-shard-{shard}"


def logged_version(folder: Path) -> int:
    """Return the newest version in a shard's log on disk, before any damage; 0 without a log."""
    version = 0
    with suppress(LogDamagedError, OSError, ValueError):
        log = WriteAheadLog(folder, "no")
        for name in log.segments()[-1:]:
            version = int(name.partition("-")[0])  # a segment's name starts with its version
            for record in log.read(name):
                entry = logged(record)
                version = entry.version if isinstance(entry, Apply) else version
    return version


def base_record(base: SegmentBase) -> Raw:
    frozen = {"held": list(base.frozen) if base.frozen is not None else None}
    return (
        ShardRecordKind.BASE,
        json.dumps({"shards": base.shards, "state": base.state, **frozen}).encode(),
        (),
    )


def model_record(model: ModelSpec) -> Raw:
    return ShardRecordKind.MODEL, model_to_proto(model).SerializeToString(), ()


def push_record(staged: Staged, staging: Staging) -> Raw:
    header = log_pb2.LoggedPush(
        staged=staged_to_proto(staged),
        absent=sorted(staging.absent),
        initial=staging.initial,
        parts=parts_to_proto(staging.named_parts),
    )
    if (groups := staging.groups) is not None:
        header.groups_json, header.own_groups = groups.text, groups.is_own
    return (
        ShardRecordKind.PUSH,
        header.SerializeToString(),
        () if staged.problem else staging.contents,
    )


def logged(record: Record) -> Logged:
    """Decode a record."""
    match ShardRecordKind(record.kind):
        case ShardRecordKind.BASE:
            raw = json.loads(record.header)
            return SegmentBase(
                raw["shards"], raw["state"], FrozenNumbers(*raw["held"]) if raw["held"] else None
            )
        case ShardRecordKind.MODEL:
            return model_from_proto(model_pb2.ModelSpec.FromString(record.header))
        case ShardRecordKind.ENTRY:
            return entry_from_proto(co.Entry.FromString(record.header))
        case ShardRecordKind.PUSH:
            message = log_pb2.LoggedPush.FromString(record.header)
            staged = staged_from_proto(message.staged)
            return LoggedPush(
                staged,
                list(message.absent),
                message.groups_json,
                message.initial,
                record.payload,
                message.own_groups,
                parts_from_proto(message.parts),
            )
