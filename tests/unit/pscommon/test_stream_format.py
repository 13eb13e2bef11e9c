"""Frames of streams, and buffers that system calls move in pieces."""

import random

import numpy as np
import pytest

from pscommon.core.errors import InvalidRequestError
from pscommon.wire.stream_format import (
    HEAD_BYTES,
    MAX_BUFFERS_COUNT,
    MAX_FRAME_MESSAGE_BYTES,
    BufferQueue,
    FrameKind,
    decode_message,
    decode_prefix,
    encode_frame,
)
from psproto.v1 import stream_pb2


@pytest.mark.parametrize("kind", FrameKind)
def test_a_frame_returns_what_it_was_made_of(kind: FrameKind) -> None:
    for message in (b"", b"message", b"long" * 1000):
        frame = bytearray(encode_frame(kind, message, 2**40, 7))
        head, rest = frame[:HEAD_BYTES], frame[HEAD_BYTES:]
        prefix = decode_prefix(head)

        assert prefix == (kind, len(message), 2**40, 7, len(rest))
        assert prefix.message(head, rest) == message


@pytest.mark.parametrize(
    "raw",
    [b"\0" * HEAD_BYTES, b"\xff" * HEAD_BYTES, b"\1" + b"\xff" * (HEAD_BYTES - 1)],
    ids=["kind 0", "an unknown kind", "a message that is too long"],
)
def test_other_bytes_are_refused(raw: bytes) -> None:
    assert int.from_bytes(b"\xff" * 4, "little") > MAX_FRAME_MESSAGE_BYTES
    with pytest.raises(InvalidRequestError, match="not a frame"):
        decode_prefix(bytearray(raw))


def test_a_message_above_the_limit_of_the_reader_is_refused() -> None:
    frame = bytearray(encode_frame(FrameKind.HELLO, bytes(1001)))

    assert decode_prefix(frame, 1001).message_nbytes == 1001
    with pytest.raises(InvalidRequestError, match="message of 1001 bytes"):
        decode_prefix(frame, 1000)


def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="not a StreamHello"):
        decode_message(stream_pb2.StreamHello, b"\xff\xff")


@pytest.mark.parametrize("seed", range(20))
def test_a_queue_yields_each_byte_once_however_calls_cut_it(seed: int) -> None:
    """Also with more buffers than one system call takes."""
    rng = random.Random(seed)
    count = rng.choice([0, 1, 2, 50, 3 * MAX_BUFFERS_COUNT])
    parts = [rng.randbytes(rng.choice([0, 1, 3, 1000])) for _ in range(count)]
    queue, found = BufferQueue(parts), b""
    while queue.remaining_nbytes:
        views = queue.next(rng.choice([1, 100, 10**6]))
        assert 0 < len(views) <= MAX_BUFFERS_COUNT
        taken = b"".join(views)[: rng.randint(1, 5000)]
        found += taken
        queue.advance(len(taken))

    assert found == b"".join(parts)


def test_a_queue_takes_arrays_of_any_shape() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    queue = BufferQueue([array.data, b"", np.zeros((0, 3), np.int64).data])

    assert b"".join(queue.next()) == array.tobytes()
