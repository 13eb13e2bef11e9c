"""Hand-made frames are real protobuf, and protobuf of any layout is decoded."""

import random
from typing import Any

import numpy as np
import pytest

from pscommon.core.errors import InvalidRequestError
from pscommon.wire.endpoint import MAX_MESSAGE_BYTES
from pscommon.wire.frames import (
    FRAME_BYTES,
    Filler,
    Frame,
    chunks,
    decode_request,
    decode_response,
    encode_data,
    encode_header,
)
from psproto.v1 import parameter_server_pb2 as pb

SIZES = (1, 127, 128, 16_383, 16_384, FRAME_BYTES, 2 * FRAME_BYTES)


def data(payload: bytes, offset: int = 0) -> Frame[Any]:
    return Frame(None, memoryview(payload), offset)


def unknown_field(number: int = 99) -> bytes:
    """Return a varint field that these messages do not have."""
    tag = number << 3
    return bytes([tag & 0x7F | 0x80, tag >> 7, 7])


@pytest.mark.parametrize("size", SIZES)
def test_a_data_frame_equals_the_generated_message(size: int) -> None:
    payload = np.random.default_rng(size).bytes(size)

    assert pb.ExchangeRequest.FromString(encode_data(memoryview(payload))).data == payload
    assert encode_data(memoryview(payload)) == pb.ExchangeResponse(data=payload).SerializeToString()


@pytest.mark.parametrize("size", SIZES)
def test_generated_data_is_read_without_a_copy(size: int) -> None:
    raw = pb.ExchangeResponse(data=bytes(size)).SerializeToString()

    view = decode_response(raw).data

    assert view.obj is raw
    assert view.nbytes == size


def test_headers_equal_the_generated_messages() -> None:
    ask = pb.PushPullHeader(job="j", worker=7, seq=2**40, absent=[1, 300], pull=pb.PULL_STEP)
    answer = pb.ExchangeResult(outcome=pb.OUTCOME_STALE, version=3, nbytes=2**33)

    assert pb.ExchangeRequest.FromString(encode_header(ask)).header == ask
    assert decode_request(pb.ExchangeRequest(header=ask).SerializeToString()) == Frame(
        ask, memoryview(b"")
    )
    assert pb.ExchangeResponse.FromString(encode_header(answer)).header == answer
    assert decode_response(pb.ExchangeResponse(header=answer).SerializeToString()).header == answer


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_unknown_fields_are_skipped(before: bool) -> None:
    for frame in (
        pb.ExchangeRequest(data=b"payload"),
        pb.ExchangeRequest(header=pb.PushPullHeader(job="j")),
    ):
        raw = frame.SerializeToString()
        decoded = decode_request(unknown_field() + raw if before else raw + unknown_field())

        assert decoded == Frame(
            frame.header if frame.HasField("header") else None, memoryview(frame.data)
        )


def test_a_header_may_carry_data() -> None:
    ask = pb.PushPullHeader(job="j", seq=3)

    raw = encode_header(ask, memoryview(b"abc"), memoryview(b"de"))

    assert decode_request(raw) == Frame(ask, memoryview(b"abcde"))
    assert pb.ExchangeRequest.FromString(raw) == pb.ExchangeRequest(header=ask, data=b"abcde")


@pytest.mark.parametrize("offset", [0, 1, 127, 128, 2**40])
def test_data_may_carry_an_offset(offset: int) -> None:
    raw = encode_data(memoryview(b"abc"), offset=offset)

    assert decode_request(raw) == data(b"abc", offset)
    assert pb.ExchangeRequest.FromString(raw) == pb.ExchangeRequest(data=b"abc", offset=offset)


def test_the_last_copy_of_a_repeated_field_counts() -> None:
    assert decode_request(
        encode_data(memoryview(b"first")) + encode_data(memoryview(b"last"))
    ) == data(b"last")


def test_an_overlong_varint_is_legal() -> None:
    assert decode_request(b"\x12\x83\x80\x00abc") == data(b"abc")


@pytest.mark.parametrize(
    "raw", [b"", unknown_field(), b"\x12\x05abc", b"\x12", b"\x12\xff\xff\xff\xff\xff\xff", b"\xff"]
)
def test_invalid_frames_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        decode_request(raw)


def test_random_bytes_are_refused_or_decoded() -> None:
    draw = random.Random(3)
    for _ in range(2_000):
        raw = bytes(draw.choices((0x0A, 0x12, 0, 1, 2, 0x80, 0xFF, 65), k=draw.randrange(9)))
        try:
            decoded = decode_request(raw)
        except InvalidRequestError:
            continue
        reference = pb.ExchangeRequest.FromString(raw)
        header = reference.header if reference.HasField("header") else None
        assert decoded == Frame(header, memoryview(reference.data), reference.offset)


def test_frames_and_views_may_span_each_other() -> None:
    draw = random.Random(5)
    for _ in range(200):
        sent = [memoryview(draw.randbytes(draw.randrange(40))) for _ in range(draw.randrange(5))]
        total = sum(view.nbytes for view in sent)
        frames = list(chunks(sent, size=draw.randrange(1, 50)))
        received, rest = [], total
        while rest:
            received.append(bytearray(draw.randrange(1, rest + 1)))
            rest -= len(received[-1])
        filler = Filler(map(memoryview, received))
        for raw in frames:
            filler.fill(decode_response(raw).data)

        assert filler.complete
        assert b"".join(received) == b"".join(sent)


def test_chunks_are_full_frames_and_fit_a_message() -> None:
    frames = list(chunks([memoryview(np.zeros(FRAME_BYTES * 5 // 2, np.uint8))]))

    assert [len(pb.ExchangeRequest.FromString(raw).data) for raw in frames] == [
        FRAME_BYTES,
        FRAME_BYTES,
        FRAME_BYTES // 2,
    ]
    assert max(map(len, frames)) < MAX_MESSAGE_BYTES


def test_views_are_treated_as_bytes_for_any_shape_and_type() -> None:
    source, target = np.arange(6, dtype=np.float64).reshape(2, 3), np.zeros((3, 2))
    (raw,) = chunks([memoryview(source), memoryview(np.zeros((0, 4)))])
    filler = Filler([target.data])
    filler.fill(memoryview(raw)[2:])

    assert filler.complete
    assert target.tobytes() == source.tobytes()


def test_excess_bytes_change_nothing() -> None:
    target = bytearray(b"....")
    filler = Filler([memoryview(target)])
    with pytest.raises(InvalidRequestError, match="1 bytes more"):
        filler.fill(memoryview(b"12345"))

    assert target == b"...."
    assert filler.missing == 4
