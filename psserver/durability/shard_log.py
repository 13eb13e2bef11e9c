"""What a shard writes down (--durability log) and what its standby is told: each push before it
is reported, each entry before it is carried out.

A segment begins with BASE, the machine as it stood (at a cut: with the snapshot's numbers;
later: after a restart), and with the pushes that were staged then. So the snapshot of a version,
the last segment that was begun at it, and all that come later are the shard.
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
    """What a record is."""

    BASE = 1
    MODEL = 2
    PUSH = 3
    ENTRY = 4


class HeldNumbers(NamedTuple):
    """In a move, the numbers of before it. reshard: the index of that entry; shards: how many
    there were then.
    """

    reshard: int
    shards: int


class SegmentBase(NamedTuple):
    """How a segment begins: the machine's state, of how many shards, and what is held for others
    to read.
    """

    shards: int
    state: dict[str, Any]
    held: HeldNumbers | None = None


class LoggedPush(NamedTuple):
    """A push as it was written. payload: valid until the next record is read; empty where there
    was a problem.
    """

    staged: Staged
    absent: Sequence[int]
    groups_json: str
    initial: bool
    payload: memoryview


Logged = SegmentBase | ModelSpec | LoggedPush | Entry


class ShardLog:
    """The log of one shard. Failures to write are not raised.

    On shard 0 what it says of a push is a record of the coordinator, on the same line and behind
    the push, and nobody learns of the push before; so nothing here waits for the standby. On the
    others `push` does, and whoever reports. Entries come from the coordinator, which keeps them
    until they are reported: they may be carried out at once.
    """

    def __init__(self, records: RecordSink, shard: int = 0) -> None:
        self._waits = shard > 0
        self._log = records

    @property
    def nbytes(self) -> int:
        """Written since the last snapshot was begun."""
        return self._log.nbytes

    @property
    def broken(self) -> bool:
        """Something since then could not be written."""
        return self._log.broken

    def begin(
        self, base: SegmentBase, model: ModelSpec | None, staged: Iterable[tuple[Staged, Staging]]
    ) -> None:
        """A new segment, for what follows on this state."""
        self._log.begin(base.state["version"], self._first(base, model, staged))

    def _first(
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
        """To be called before anybody is told that the push is here."""
        if not self._log.idle:
            self._log.append(*push_record(staged, staging), settled=self._waits)

    def entry(self, entry: Entry) -> None:
        """To be called before the entry is carried out."""
        if not self._log.idle:
            self._log.append(
                ShardRecordKind.ENTRY, entry_to_proto(entry).SerializeToString(), settled=False
            )

    def before_report(self) -> None:
        """Returns when it may be told how far this shard is."""
        if self._waits:
            self._log.settle()

    def applied(self, version: int, store: ParameterStore) -> None:
        """These are the numbers at this version. To be called while nothing is applied."""
        self._log.checksum(version, store)

    def moved(self) -> None:
        """This shard's numbers are other ones now, and no record says which."""
        self._log.void("the model has moved")

    def since(self, version: int | None) -> Iterator[Logged]:
        """What was written since a snapshot was cut; None: since the beginning. LogDamagedError,
        OSError.
        """
        return map(logged, self._log.since(version))

    def retire(self, version: int) -> None:
        """There is a snapshot of this version."""
        self._log.retire(version)

    def clear(self) -> None:
        """The log that this was about is void."""
        self._log.clear()

    def close(self) -> None:
        self._log.close()


def folder_of(data_dir: Path, shard: int) -> Path:
    """Where a shard's log lies in a data directory."""
    return data_dir / f"log-shard-{shard}"


def logged_version(folder: Path) -> int:
    """Return the newest version in a shard's log on disk: 0 without a log, up to the damage in a
    damaged one.
    """
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
    """A record, read again."""
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
