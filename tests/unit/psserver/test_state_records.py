"""Records for a standby are transferred completely or not at all."""

import pytest

from pscommon.core.errors import PSError
from pscommon.wire.frames import FRAME_BYTES
from psproto.v1 import standby_pb2 as pb
from psserver.durability.record_sink import RecordSource
from psserver.durability.state_records import StateRecord, copied, frames, received


@pytest.mark.parametrize("nbytes", [0, 1, FRAME_BYTES, FRAME_BYTES + 1, 3 * FRAME_BYTES])
def test_a_record_arrives_as_it_was_sent(nbytes: int) -> None:
    payload = bytes(range(256)) * (nbytes // 256 + 1)
    record = copied(RecordSource.SHARD, 3, b"header", [memoryview(payload)[:nbytes]])

    messages = [
        *frames(7, record),
        pb.ReplicateResponse(),
        *frames(8, StateRecord(RecordSource.JOB, 2, b"x")),
    ]
    first, beat, second = received(messages)

    assert first[1] is not None
    assert (first[0], first[1].source, first[1].kind, first[1].header) == (
        7,
        RecordSource.SHARD,
        3,
        b"header",
    )
    assert bytes(first[1].payload[0]) == payload[:nbytes]
    assert beat == (0, None)
    assert second[0] == 8
    assert max(len(message.data) for message in messages) <= FRAME_BYTES


def test_a_received_record_does_not_refer_to_the_buffer() -> None:
    memory = bytearray(b"abc")
    record = copied(RecordSource.SHARD, 3, b"", [memoryview(memory)])
    memory[:] = b"xyz"

    assert record.payload == [b"abc"]


def test_a_partial_record_is_refused() -> None:
    record = copied(RecordSource.SHARD, 3, b"", [memoryview(bytes(3 * FRAME_BYTES))])

    with pytest.raises(PSError, match="record 7 ended after"):
        list(received(list(frames(7, record))[:2]))
