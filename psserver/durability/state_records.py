"""Records from a primary to its standby: log records, and records about the stream itself."""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from pscommon.core.errors import PSError
from pscommon.core.formats import spoken_format
from pscommon.optim.specs import Scalars, groups_to_json, scalars_from_json, scalars_to_json
from pscommon.parameters.partition import raw
from pscommon.wire.frames import FRAME_BYTES
from psproto.v1 import standby_pb2 as pb
from psserver.durability.coordinator_log import CoordinatorRecordKind as JobKind
from psserver.durability.record_sink import RecordSource
from psserver.durability.shard_log import base_record, model_record, push_record
from psserver.durability.shard_state import ShardState
from psserver.parameters.store import ParameterStore


class StateRecordKind(IntEnum):
    """Type of a record about the stream.

    HELLO: starts a whole state; JSON about the primary.
    NUMBERS: one flat tensor of ParameterStore.export; the header is its key.
    OPTIMIZER: JSON; hyper-parameters, steps and scalars.
    LOADED: ends the whole state.
    CHECKSUM: JSON; checksum of the arrays at a version.
    END: the job has ended.
    SNAPSHOT: the manifest of a new snapshot.
    """

    HELLO = 1
    NUMBERS = 2
    OPTIMIZER = 3
    LOADED = 4
    CHECKSUM = 5
    END = 6
    SNAPSHOT = 7


class StateRecord(NamedTuple):
    """One record.

    source: subject of the record.
    kind: type of the record, for this source.
    header: encoded metadata.
    payload: bytes in parts that each fit into a frame; one part after receiving.
    """

    source: RecordSource
    kind: int
    header: bytes
    payload: Sequence[bytes | memoryview] = ()

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(len(part) for part in self.payload)


def copied(
    source: RecordSource, kind: int, header: bytes, payload: Iterable[memoryview] = ()
) -> StateRecord:
    """Return a record that does not refer to the memory of its arguments."""
    parts = [bytes(part) for view in payload for part in _frames(view)]
    return StateRecord(source, kind, header, parts)


def about(kind: StateRecordKind, **values: Any) -> StateRecord:
    return StateRecord(RecordSource.LINE, kind, json.dumps(values).encode())


def shard_records(state: ShardState) -> Iterator[StateRecord]:
    """Yield a shard's whole state. Everything is copied before the last record is returned."""
    store = state.store
    yield copied(RecordSource.SHARD, *base_record(state.base()))
    if state.model is not None and store is not None:
        yield copied(RecordSource.SHARD, *model_record(state.model))
        for key, tensor in store.export().items():
            yield StateRecord(
                RecordSource.LINE, StateRecordKind.NUMBERS, key.encode(), _frames(raw(tensor))
            )
        yield about(
            StateRecordKind.OPTIMIZER,
            groups=groups_to_json(store.groups()),
            steps=sorted(store.steps().items()),
            scalars=scalars_to_json(store.scalars()),
        )
    for push, staging in state.staged_pushes():
        yield copied(RecordSource.SHARD, *push_record(push, staging))


def job_state(state: Mapping[str, Any]) -> StateRecord:
    return StateRecord(RecordSource.JOB, JobKind.BASE, json.dumps(state).encode())


def _frames(view: memoryview) -> list[memoryview]:
    return [view[start : start + FRAME_BYTES] for start in range(0, len(view), FRAME_BYTES)]


def frames(number: int, record: StateRecord) -> Iterator[pb.ReplicateResponse]:
    """Yield the messages that transmit a record."""
    nbytes = sum(len(part) for part in record.payload)
    first, *rest = record.payload or (b"",)
    yield pb.ReplicateResponse(
        number=number,
        source=record.source,
        kind=record.kind,
        header=record.header,
        nbytes=nbytes,
        data=bytes(first),
        format=spoken_format(),
    )
    for part in rest:
        yield pb.ReplicateResponse(number=number, data=bytes(part))


def received(messages: Iterable[pb.ReplicateResponse]) -> Iterator[tuple[int, StateRecord | None]]:
    """Yield received records with their numbers; None: a keepalive.

    Raises:
        PSError: The messages are not those of `frames`.
    """
    messages = iter(messages)
    for message in messages:
        if not message.number:
            yield 0, None
            continue
        payload, filled = memoryview(bytearray(message.nbytes)), 0
        part = message
        while True:
            payload[filled : filled + len(part.data)] = part.data
            filled += len(part.data)
            if filled >= message.nbytes:
                break
            part = next(messages, None)  # type: ignore[assignment]
            if part is None or part.number != message.number:
                raise PSError(
                    f"record {message.number} ended after {filled} of {message.nbytes} bytes"
                )
        yield (
            message.number,
            StateRecord(RecordSource(message.source), message.kind, message.header, (payload,)),
        )


class ReceivedState:
    """Arrays of a received whole state (implements PartReader)."""

    def __init__(self) -> None:
        self._numbers: dict[str, memoryview] = {}
        self._groups, self._steps = "", dict[int, int]()
        self._scalars: Scalars = {}

    def add(self, record: StateRecord) -> None:
        """Add a NUMBERS or OPTIMIZER record."""
        if record.kind == StateRecordKind.NUMBERS:
            self._numbers[record.header.decode()] = memoryview(record.payload[0])
        else:
            values = json.loads(record.header)
            self._groups, self._steps = values["groups"], dict(values["steps"])
            self._scalars = scalars_from_json(values.get("scalars", ""))

    def read(self, kind: str, start: int, stop: int, out: memoryview) -> bool:
        found = self._numbers.get(f"{kind}@{start}")
        if found is None or len(found) != len(out):
            return False
        out[:] = found
        return True

    def kinds(self) -> set[str]:
        return {key.partition("@")[0] for key in self._numbers}

    def steps(self) -> dict[int, int]:
        return self._steps

    def scalars(self) -> Scalars:
        return self._scalars

    def groups_json(self) -> str:
        return self._groups


def checksum(store: ParameterStore) -> int:
    """Return a checksum of all arrays of a shard. Must not run during an update."""
    total = 0
    for key, tensor in store.tensors():
        total = zlib.crc32(raw(tensor), zlib.crc32(key.encode(), total))
    return zlib.crc32(scalars_to_json(store.scalars()).encode(), total)
