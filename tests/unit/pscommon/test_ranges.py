"""Numbers and lists of requests are checked where a message is decoded."""

import time

import pytest
from google.protobuf.message import Message

from pscommon.core.errors import InvalidRequestError
from pscommon.core.limits import MAX_DIMENSIONS, MAX_REPORTED_VALUES, MAX_TENSORS
from pscommon.wire.frames import decode_request, encode_header
from pscommon.wire.ranges import CHECKED, LENGTHS, check_ranges
from pscommon.wire.stream_format import decode_message
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import model_pb2
from psproto.v1 import parameter_server_pb2 as ps
from tests.support.request_numbers import cases

KINDS = sorted(CHECKED, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_ends_of_each_range_are_taken_and_numbers_beyond_are_refused(
    kind: type[Message],
) -> None:
    base = co.CollectiveRequest(number=1) if kind is co.CollectiveRequest else kind()
    if kind is co.ReshardRequest:
        base = co.ReshardRequest(shards=1)
    for case in cases(kind):
        message = case.put(base)
        if kind.__name__ == "CoordinatorRequest" and case.path[0].name == "collective":
            message.collective.number = message.collective.number or 1  # type: ignore[attr-defined]
        raw, field = message.SerializeToString(), case.path[-1]
        if case.is_allowed:
            assert decode_message(kind, raw) == message
        elif not (field.name == "number" and case.number == 0 and len(case.path) > 1):
            with pytest.raises(InvalidRequestError) as caught:
                decode_message(kind, raw)
            where = f"{field.containing_type.name}.{field.name} refused: "
            assert where in str(caught.value)
            assert str(case.number) in str(caught.value)
            reason = "OUT_OF_RANGE" if field.enum_type is None else "INVALID_REQUEST"
            assert caught.value.reason == reason


def test_a_refusal_names_field_value_and_range_and_a_remedy() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_ranges(co.NextBatchRequest(loop=co.LoopSpec(loop=2**32 - 1)))

    assert str(caught.value) == (
        "LoopSpec.loop refused: 4294967295 is not between 0 and 10000000. Try: one loop for many "
        "passes: job.batches(epochs=N)"
    )


def test_a_frame_with_a_header_out_of_range_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"PushPullHeader\.wait_ms refused"):
        decode_request(encode_header(ps.PushPullHeader(wait_ms=2**32 - 1)))
    with pytest.raises(InvalidRequestError, match=r"Batch\.number refused"):
        decode_request(encode_header(ps.PushPullHeader(batches=[ps.Batch(number=2**63)])))


def test_messages_of_clients_and_disks_are_not_checked() -> None:
    """An answer is decoded by a client, and may have any number."""
    result = ps.ExchangeResult(version=2**64 - 1)

    assert decode_message(ps.ExchangeResult, result.SerializeToString()) == result


LONG = {
    "tensors": model_pb2.ModelSpec(tensors=[model_pb2.TensorSpec()] * (MAX_TENSORS + 1)),
    "shape": model_pb2.TensorSpec(shape=[1] * (MAX_DIMENSIONS + 1)),
    "values": co.HeartbeatRequest(values=[co.ReportedValue()] * (MAX_REPORTED_VALUES + 1)),
}


@pytest.mark.parametrize("name", LONG)
def test_a_list_that_is_too_long_is_refused(name: str) -> None:
    message = LONG[name]
    with pytest.raises(InvalidRequestError, match="items are above") as caught:
        check_ranges(message)
    assert caught.value.reason == "OUT_OF_RANGE"
    getattr(message, name).pop()
    check_ranges(message)


def test_a_list_of_millions_of_items_is_refused_at_once() -> None:
    """Its items are not looked at."""
    raw = co.RegisterRequest(model=LONG["tensors"]).SerializeToString() * 20  # one list: merged
    message = co.RegisterRequest.FromString(raw)
    assert len(message.model.tensors) > 10 * LENGTHS[model_pb2.ModelSpec]["tensors"]
    began = time.process_time()
    with pytest.raises(InvalidRequestError):
        check_ranges(message)

    assert time.process_time() - began < 0.1
