"""The framed protocol of stream connections (TCP and Unix sockets).

A connection begins with MAGIC in each direction, then a HELLO frame and its answer WELCOME. HELLO
states the purpose of the connection. For exchanges, the worker makes one at a time:

- EXCHANGE with a PushPullHeader. At most EAGER_BYTES of data follow at once. A larger push waits
  for GO, so that a refusal reaches a worker that has sent nothing.
- RESULT with an ExchangeResult, then the weights. ERROR with a google.rpc.Status instead: the
  connection stays usable.
- ALIVE, every second between a request and its answer.
- An open push (header.open) always waits for GO. Then DATA frames carry pieces with their offset,
  and CLOSE the closing header.

Before an exchange, a worker at a Unix socket may offer shared memory: MEMORY with a PushPullHeader
(job, worker, term, and the number of the memory). Its data are one byte, and with that byte comes
the descriptor of a sealed memfd. RESULT without a message says that the server has mapped it, ERROR
why not. The kernel drops descriptors that come with any other byte.

For requests to the coordinator, the worker sends one at a time: REQUEST with a CoordinatorRequest,
answered by RESULT with the response, or by ERROR. ALIVE comes every second before the answer.

For the connection between a shard and shard 0, both send LINK frames at any time. Their data is one
message of CoordinatorService.LinkShard.

A frame is a head of HEAD_BYTES, the rest of its message, and data. The head has a prefix and the
beginning of the message, padded with zeros: most messages fit, so a frame needs one read. Data go
from and to the memory of the caller without a copy.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from pscommon.core.errors import InvalidRequestError
from pscommon.wire.ranges import CHECKED, check_ranges

MAGIC = b"PSstrm01"

EAGER_BYTES = 256 << 10
"""Data that a worker sends without waiting for GO; a refusing server reads and drops them."""

PIECE_BYTES = 1 << 20
"""Most bytes of one read or write: progress is visible after each piece."""

MAX_FRAME_MESSAGE_BYTES = 8 << 20
"""Longest message of a frame; larger ones are refused before memory is allocated."""

MAX_HELLO_BYTES = 64 << 10
"""Longest message of a greeting: its sender is not known yet."""

MAX_BUFFERS_COUNT = 1024
"""Buffers of one system call (IOV_MAX of Linux)."""

ALIVE_INTERVAL_SECONDS = 1.0
SILENCE_SECONDS = 4.0
"""Time without a byte after which a worker takes a server for lost that owes it an answer."""

HELLO_SECONDS = 5.0
"""Time for the first messages of a connection."""

M = TypeVar("M", bound=Message)

_PREFIX = struct.Struct("<BxxxIQQ")
HEAD_BYTES = 128


class FrameKind(IntEnum):
    """Kind of a frame."""

    HELLO = 1
    WELCOME = 2
    EXCHANGE = 3
    GO = 4
    DATA = 5
    CLOSE = 6
    RESULT = 7
    ERROR = 8
    ALIVE = 9
    REQUEST = 10
    LINK = 11
    MEMORY = 12


class FramePrefix(NamedTuple):
    """What a frame's head says.

    Attributes:
        kind: Kind of the frame.
        message_nbytes: Size of the message.
        data_nbytes: Bytes of data that belong to the frame.
        offset: Position of the data in an open push.
        rest_nbytes: Bytes of the message after the head.
    """

    kind: FrameKind
    message_nbytes: int
    data_nbytes: int
    offset: int
    rest_nbytes: int

    def message(self, head: bytearray, rest: bytearray) -> bytes:
        """Return the message of the frame with this head."""
        return bytes(head[_PREFIX.size : _PREFIX.size + self.message_nbytes]) + rest


def encode_frame(
    kind: FrameKind, message: bytes = b"", data_nbytes: int = 0, offset: int = 0
) -> bytes:
    """Return a frame's head and message; its data follow."""
    head = _PREFIX.pack(kind, len(message), data_nbytes, offset) + message
    return head.ljust(HEAD_BYTES, b"\0")


def decode_prefix(
    raw: bytearray | memoryview, most_nbytes: int = MAX_FRAME_MESSAGE_BYTES
) -> FramePrefix:
    """Return the prefix of a head.

    most_nbytes: The longest message that is taken.

    Raises:
        InvalidRequestError: These bytes are no head of a frame, or its message is longer.
    """
    kind, message_nbytes, data_nbytes, offset = _PREFIX.unpack_from(raw)
    if kind not in _KINDS or message_nbytes > most_nbytes:
        raise InvalidRequestError(f"not a frame: kind {kind}, message of {message_nbytes} bytes")
    rest_nbytes = max(0, message_nbytes - (HEAD_BYTES - _PREFIX.size))
    return FramePrefix(_KINDS[kind], message_nbytes, data_nbytes, offset, rest_nbytes)


def decode_message(kind: type[M], raw: bytes | bytearray) -> M:
    """Return the message of a frame or a call.

    Raises:
        InvalidRequestError: It is none of this kind, or a number of a request is out of its range.
    """
    try:
        message = kind.FromString(bytes(raw))
    except DecodeError as error:
        raise InvalidRequestError(f"not a {kind.__name__}: {error}") from error
    if kind in CHECKED:
        check_ranges(message)
    return message


_KINDS = {int(kind): kind for kind in FrameKind}


class BufferQueue:
    """Consecutive buffers to fill or to send, however the system calls cut them.

    Attributes:
        remaining_nbytes: Bytes that are not done yet.
    """

    def __init__(self, buffers: Sequence[memoryview | bytes | bytearray]) -> None:
        self._buffers = [_flat(buffer) for buffer in buffers if len(buffer)]
        self._buffers.reverse()  # the next one is at the end
        self.remaining_nbytes = sum(buffer.nbytes for buffer in self._buffers)

    def next(self, nbytes: int = PIECE_BYTES) -> list[memoryview]:
        """Return the next buffers: at most MAX_BUFFERS_COUNT, and about `nbytes` bytes."""
        if len(self._buffers) == 1:
            return [self._buffers[0][:nbytes]]
        found: list[memoryview] = []
        for buffer in reversed(self._buffers[-MAX_BUFFERS_COUNT:]):
            found.append(buffer[:nbytes])
            nbytes -= buffer.nbytes
            if nbytes <= 0:
                break
        return found

    def advance(self, nbytes: int) -> None:
        """Record that the next `nbytes` bytes are done."""
        self.remaining_nbytes -= nbytes
        while nbytes:
            buffer = self._buffers[-1]
            if nbytes < buffer.nbytes:
                self._buffers[-1] = buffer[nbytes:]
                return
            nbytes -= self._buffers.pop().nbytes


def _flat(buffer: memoryview | bytes | bytearray) -> memoryview:
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
