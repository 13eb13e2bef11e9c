"""Frames of the Exchange stream, made and read by hand: a data frame is copied once when sent
and never when read.

On the wire every frame is an ExchangeRequest or ExchangeResponse as proto/ has it, so any gRPC
client can talk to these servers. What has another layout than ours (unknown fields, fields
twice) is legal protobuf too, and is left to the generated classes.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import grpc
from google.protobuf.message import DecodeError

from pscommon.core.errors import InvalidRequestError
from pscommon.wire.ranges import check_ranges
from pscommon.wire.requests import EXCHANGE, EXCHANGE_ONCE, Stub
from psproto.v1 import parameter_server_pb2 as pb

FRAME_BYTES = 1 << 20
"""Payload of one data frame; 1 to 2 MiB is fastest."""

HEADER_TAG, DATA_TAG, OFFSET_TAG = 0x0A, 0x12, 0x18
NOTHING = memoryview(b"")

Header = pb.PushPullHeader | pb.ExchangeResult
H = TypeVar("H", pb.PushPullHeader, pb.ExchangeResult)


class Frame(NamedTuple, Generic[H]):
    """What came: a header, data (a view into what was received, perhaps empty), or both."""

    header: H | None
    data: memoryview
    offset: int = 0


def encode_header(header: Header, *views: memoryview) -> bytes:
    """A frame with a PushPullHeader (request) or an ExchangeResult (response), and the bytes of
    `views` if any.
    """
    body = header.SerializeToString()
    return b"".join((_prefix(HEADER_TAG, len(body)), body, *_data(views)))


def encode_data(*views: memoryview, offset: int = 0) -> bytes:
    """One data frame with the bytes of `views` one after another; copies them once."""
    return b"".join((_prefix(OFFSET_TAG, offset) if offset else b"", *_data(views)))


def decode_request(raw: bytes) -> Frame[pb.PushPullHeader]:
    """A frame that a server received. InvalidRequestError if it is none, or if a number of its
    header is out of its range.
    """
    frame: Frame[pb.PushPullHeader]
    frame = _read(raw, pb.PushPullHeader) or _parsed(raw, pb.ExchangeRequest)
    if frame.header is not None:
        check_ranges(frame.header)
    return frame


def decode_response(raw: bytes) -> Frame[pb.ExchangeResult]:
    """A frame that a client received, as decode_request."""
    return _read(raw, pb.ExchangeResult) or _parsed(raw, pb.ExchangeResponse)


def chunks(views: Iterable[memoryview], size: int = FRAME_BYTES) -> Iterator[bytes]:
    """Yield data frames with the bytes of `views`; all frames but the last have `size` bytes."""
    parts: list[memoryview] = []
    space = size
    for view in map(_flat, views):
        position = 0
        while position < view.nbytes:
            part = view[position : position + space]
            parts.append(part)
            position, space = position + part.nbytes, space - part.nbytes
            if not space:
                yield encode_data(*parts)
                parts, space = [], size
    if parts:
        yield encode_data(*parts)


class Filler:
    """Writes incoming bytes into consecutive writable views, however the frames cut them."""

    def __init__(self, views: Iterable[memoryview]) -> None:
        self._views = [flat for flat in map(_flat, views) if flat.nbytes]
        self._current = 0
        self._position = 0
        self.missing = sum(view.nbytes for view in self._views)

    @property
    def complete(self) -> bool:
        return self.missing == 0

    def fill(self, data: memoryview) -> None:
        """Takes the next bytes of the stream. InvalidRequestError, and nothing written, if they
        do not all fit.
        """
        if data.nbytes > self.missing:
            raise InvalidRequestError(f"{data.nbytes - self.missing} bytes more than the model has")
        self.missing -= data.nbytes
        while data.nbytes:
            view = self._views[self._current]
            part = data[: view.nbytes - self._position]
            view[self._position : self._position + part.nbytes] = part
            data, self._position = data[part.nbytes :], self._position + part.nbytes
            if self._position == view.nbytes:
                self._current, self._position = self._current + 1, 0


class ExchangeStub:
    """Calls Exchange with raw frames. The same on the wire, with less machinery: `ask` for
    requests of one frame, `once` (ExchangeOnce) where one frame each way is enough."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.stream = Stub(channel, EXCHANGE)
        self.ask = Stub(channel, EXCHANGE, "unary_stream")
        self.once = Stub(channel, EXCHANGE_ONCE)


def _flat(view: memoryview) -> memoryview:
    if view.format == "B" and view.ndim == 1:
        return view
    return view.cast("B") if view.nbytes else memoryview(b"")


def _data(views: tuple[memoryview, ...]) -> tuple[bytes | memoryview, ...]:
    length = sum(view.nbytes for view in views)
    return (_prefix(DATA_TAG, length), *views) if length else ()


def _prefix(tag: int, number: int) -> bytes:
    out = bytearray((tag,))
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _read(raw: bytes, header: type[H]) -> Frame[H] | None:
    """A frame with each field at most once and no other fields; None for everything else, also
    for no bytes.
    """
    found: dict[int, Any] = {}
    position = 0
    while position < len(raw):
        tag = raw[position]
        number, position = _varint(raw, position + 1)
        end = position if tag == OFFSET_TAG else position + number
        if tag in found or tag not in (HEADER_TAG, DATA_TAG, OFFSET_TAG) or end > len(raw):
            return None
        found[tag] = number if tag == OFFSET_TAG else memoryview(raw)[position:end]
        position = end
    if position != len(raw) or not found:
        return None
    try:
        read = header.FromString(bytes(found[HEADER_TAG])) if HEADER_TAG in found else None
    except DecodeError:
        return None
    return Frame(read, found.get(DATA_TAG, NOTHING), found.get(OFFSET_TAG, 0))


def _varint(raw: bytes, position: int) -> tuple[int, int]:
    """(number, where it ends); a number that does not end there ends beyond the bytes."""
    number = shift = 0
    while position < len(raw) and shift < 64:
        byte = raw[position]
        number |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return number, position
    return 0, len(raw) + 1


def _parsed(raw: bytes, kind: Any) -> Any:
    try:
        frame = kind.FromString(raw)
    except DecodeError as error:
        raise InvalidRequestError(f"not an Exchange frame: {error}") from error
    header = frame.header if frame.HasField("header") else None
    if header is None and not frame.data:
        raise InvalidRequestError("an Exchange frame with neither header nor data")
    return Frame(header, memoryview(frame.data), frame.offset)
