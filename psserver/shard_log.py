"""What a shard writes down (--durability log): each push before it is reported, each entry before it is carried out.

A segment begins with BASE, the machine as it stood (at a cut: with the snapshot's numbers; later: after a restart), and
with the pushes that were staged then. So the snapshot of a version and all segments from that version on are the shard.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from pscommon.core.log import Entry, Staged
from pscommon.core.model import ModelSpec
from pscommon.optimizers import groups_to_json
from pscommon.record_log import Fsync, Record
from pscommon.wire.codec import (
    entry_from_proto,
    entry_to_proto,
    model_from_proto,
    model_to_proto,
    staged_from_proto,
    staged_to_proto,
)
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import log_pb2, model_pb2
from psserver.guarded_log import GuardedLog, Raw
from psserver.staging import Staging


class Kind(IntEnum):
    """What a record is."""

    BASE = 1
    MODEL = 2
    PUSH = 3
    ENTRY = 4


class Base(NamedTuple):
    """How a segment begins: the machine's state, and of how many shards."""

    shards: int
    state: dict[str, Any]


class LoggedPush(NamedTuple):
    """A push as it was written. payload: valid until the next record is read; empty where there was a problem."""

    staged: Staged
    absent: Sequence[int]
    groups_json: str
    initial: bool
    payload: memoryview


Logged = Base | ModelSpec | LoggedPush | Entry


class ShardLog:
    """The log of one shard. Failures to write are told to on_failure, not raised."""

    def __init__(
        self, data_dir: Path, shard: int, shards: int, fsync: Fsync, on_failure: Callable[[str], None]
    ) -> None:
        self._shards = shards
        self._log = GuardedLog(data_dir / f"log-shard-{shard}", fsync, on_failure)

    @property
    def nbytes(self) -> int:
        """Written since the last snapshot was begun."""
        return self._log.nbytes

    @property
    def broken(self) -> bool:
        """Something since then could not be written."""
        return self._log.broken

    def begin(
        self, version: int, state: dict[str, Any], model: ModelSpec | None, staged: Iterable[tuple[Staged, Staging]]
    ) -> None:
        """A new segment, for what follows on this state."""
        self._log.begin(version, self._first(state, model, staged))

    def _first(
        self, state: dict[str, Any], model: ModelSpec | None, staged: Iterable[tuple[Staged, Staging]]
    ) -> Iterator[Raw]:
        yield Kind.BASE, json.dumps(Base(self._shards, state)._asdict()).encode(), ()
        if model is not None:
            yield Kind.MODEL, model_to_proto(model).SerializeToString(), ()
        for each, staging in staged:
            yield _push(each, staging)

    def model(self, spec: ModelSpec) -> None:
        self._log.append(Kind.MODEL, model_to_proto(spec).SerializeToString())

    def push(self, staged: Staged, staging: Staging) -> None:
        """To be called before anybody is told that the push is here."""
        self._log.append(*_push(staged, staging))

    def entry(self, entry: Entry) -> None:
        """To be called before the entry is carried out."""
        self._log.append(Kind.ENTRY, entry_to_proto(entry).SerializeToString())

    def since(self, version: int) -> Iterator[Logged]:
        """What was written since a snapshot was cut. LogDamagedError, OSError."""
        return map(_logged, self._log.since(version))

    def retire(self, version: int) -> None:
        """There is a snapshot of this version."""
        self._log.retire(version)

    def clear(self) -> None:
        """The log that this was about is void."""
        self._log.clear()

    def close(self) -> None:
        self._log.close()


def _push(staged: Staged, staging: Staging) -> Raw:
    header = log_pb2.LoggedPush(
        staged=staged_to_proto(staged),
        absent=sorted(staging.absent),
        groups_json=groups_to_json(staging.groups) if staging.groups is not None else "",
        initial=staging.initial,
    )
    return Kind.PUSH, header.SerializeToString(), () if staged.problem else staging.contents


def _logged(record: Record) -> Logged:
    match Kind(record.kind):
        case Kind.BASE:
            return Base(**json.loads(record.header))
        case Kind.MODEL:
            return model_from_proto(model_pb2.ModelSpec.FromString(record.header))
        case Kind.ENTRY:
            return entry_from_proto(co.Entry.FromString(record.header))
        case Kind.PUSH:
            message = log_pb2.LoggedPush.FromString(record.header)
            staged = staged_from_proto(message.staged)
            return LoggedPush(staged, list(message.absent), message.groups_json, message.initial, record.payload)
