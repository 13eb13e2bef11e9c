"""Each integer of each request has a range, and what takes its value on can hold it."""

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from pscommon.core.limits import MAX_LOOPS, MAX_SHARDS
from pscommon.wire.ranges import CHECKED, INTEGERS, LENGTHS, RANGES, REMEDIES
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import log_pb2, model_pb2, shard_pb2, standby_pb2, stream_pb2
from psproto.v1 import parameter_server_pb2 as ps

INTEGER_TYPES = {
    kind
    for name in ("INT32", "INT64", "UINT32", "UINT64", "SINT32", "SINT64")
    for kind in [getattr(FieldDescriptor, f"TYPE_{name}")]
} | {
    getattr(FieldDescriptor, f"TYPE_{name}")
    for name in ("FIXED32", "FIXED64", "SFIXED32", "SFIXED64")
}

CARRIED: dict[str, str] = {
    "RegisterRequest.seed": "RegisterResponse.seed",
    "HeartbeatRequest.worker": "Begin.worker Evict.worker HistoryRow.worker",
    "ReportedValue.version": "HistoryRow.version",
    "JoinRequest.rank": "HistoryRow.rank",
    "TensorSpec.shape": "TensorSpec.shape",
    "TensorSpec.group": "TensorSpec.group",
    # as many named passes may follow it
    "LoopSpec.loop": f"JoinResponse.known_loops+{MAX_LOOPS + 1} JoinResponse.open_loop+1 "
    f"JoinResponse.open_loops NextBatchResponse.loop+{MAX_LOOPS} Batch.loop+{MAX_LOOPS}",
    "LoopSpec.first_epoch": "NextBatchResponse.first_epoch",
    "LoopSpec.size": "NextBatchResponse.numbers NextBatchResponse.share",
    "LoopSpec.batches": "NextBatchResponse.numbers NextBatchResponse.share",
    "ScriptPlace.pass_number": "LoaderPasses.begun+1 LoaderPasses.open",
    "Batch.loop": "Batch.loop",
    "Batch.number": "Batch.number NextBatchResponse.numbers+1",
    "Batch.count": "Batch.count",
    "ReshardRequest.shards": "Reshard.shards LinkShardResponse.shards DescribeResponse.shards",
    "LinkShardRequest.term": "HeartbeatResponse.terms+1 PushPullHeader.term+1 StreamHello.term+1",
    "PushKey.worker": "PushKey.worker",
    "PushKey.seq": "PushKey.seq+1",
    "Staged.samples": "Contribution.samples",
    "Staged.base": "Contribution.base ExchangeResult.staleness+1",
    "MoveResult.nbytes": f"ReshardResponse.nbytes*{MAX_SHARDS}",
    "PushPullHeader.worker": "PushKey.worker",
    "PushPullHeader.seq": "PushKey.seq+1",
    "PushPullHeader.base": "Staged.base ExchangeResult.staleness+1",
    "PushPullHeader.samples": "Staged.samples",
    "PushPullHeader.absent": "LoggedPush.absent",
    "Part.ranges": "Part.ranges",
    "ReadShardRequest.start": "ReadShardResponse.start",
}
"""Fields of answers, of the log and of messages between servers that take a number on; `+` and `*`
say what is added, or how many are added up. Other numbers are compared, or stored as JSON alone.
"""


def integers(kind: type[Message]) -> Iterator[FieldDescriptor]:
    """Yield the fields of a message with integers; of a map, its own field."""
    for field in kind.DESCRIPTOR.fields:
        inner = field.message_type
        parts = inner.fields if inner is not None and inner.GetOptions().map_entry else [field]
        if any(part.type in INTEGER_TYPES for part in parts):
            yield field


def test_each_integer_of_a_request_has_a_range() -> None:
    for kind in CHECKED:
        names = {field.name for field in integers(kind)}
        assert RANGES.get(kind, {}).keys() == names, kind.__name__
    assert RANGES.keys() <= set(CHECKED)


def test_each_list_with_numbers_has_a_length() -> None:
    for kind in CHECKED:
        lists = {
            field.name
            for field in kind.DESCRIPTOR.fields
            if field.default_value == []
            and (
                field in set(integers(kind))
                or (field.message_type and not field.message_type.GetOptions().map_entry)
            )
        }
        assert LENGTHS.get(kind, {}).keys() == lists, kind.__name__
    assert LENGTHS.keys() <= set(CHECKED)


def test_the_types_of_integers_are_known() -> None:
    for kind in CHECKED:
        for field in integers(kind):
            if field.message_type is None:
                assert field.type in INTEGERS, field.full_name
                allowed, of_type = RANGES[kind][field.name], INTEGERS[field.type]
                assert of_type[0] <= allowed[0] <= allowed[-1] <= of_type[-1], field.full_name


def field_named(text: str) -> FieldDescriptor:
    name, _, field = text.partition(".")
    for file in (co, ps, log_pb2, model_pb2, shard_pb2, standby_pb2, stream_pb2):
        if (found := file.DESCRIPTOR.message_types_by_name.get(name)) is not None:
            return found.fields_by_name[field]
    return next(kind for kind in CHECKED if kind.__name__ == name).DESCRIPTOR.fields_by_name[field]


def highest(field: FieldDescriptor) -> int:
    return RANGES[GetMessageClass(field.containing_type)][field.name][-1]


@pytest.mark.parametrize("source", CARRIED)
def test_a_number_fits_what_takes_it_on(source: str) -> None:
    largest = highest(field_named(source))
    for text in CARRIED[source].split():
        name, _, more = text.partition("+")
        name, _, factor = name.partition("*")
        target = field_named(name)
        carried = largest * int(factor or 1) + int(more or 0)
        assert carried in INTEGERS[target.type], f"{carried} does not fit {name}"


def test_remedies_name_fields() -> None:
    for name in REMEDIES:
        assert field_named(name) is not None


def test_the_law_finds_a_field_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the loop number that stopped every Join."""
    rows: dict[str, Any] = {**RANGES[co.LoopSpec], "loop": range(2**32)}
    monkeypatch.setitem(RANGES, co.LoopSpec, rows)  # type: ignore[arg-type]

    with pytest.raises(AssertionError, match="does not fit"):
        test_a_number_fits_what_takes_it_on("LoopSpec.loop")
