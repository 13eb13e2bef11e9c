"""Frames of the Exchange stream, made and read by hand: a data frame is copied once when sent and never when read.

On the wire every frame is an ExchangeRequest or ExchangeResponse as proto/ has it, so any gRPC client can talk to these
servers. Both have `header = 1` and `data = 2` in a oneof, so one tag byte tells them apart. What has another layout
(unknown fields, odd order) is legal protobuf too, and is left to the generated classes.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from pscommon.core.errors import InvalidRequestError
from pscommon.wire.channel import FRAME_BYTES
from psproto.v1 import parameter_server_pb2 as pb

SERVICE = "psproto.v1.ParameterServerService"
EXCHANGE = f"/{SERVICE}/Exchange"

HEADER_TAG = 0x0A
DATA_TAG = 0x12

Header = pb.PushPullHeader | pb.ExchangeResult


def encode_header(header: Header) -> bytes:
    """The first frame of a stream: a PushPullHeader (request) or an ExchangeResult (response)."""
    body = header.SerializeToString()
    return _prefix(HEADER_TAG, len(body)) + body


def encode_data(*views: memoryview) -> bytes:
    """One data frame with the bytes of `views` one after another; copies them once."""
    return b"".join((_prefix(DATA_TAG, sum(view.nbytes for view in views)), *views))


def decode_request(raw: bytes) -> pb.PushPullHeader | memoryview:
    """A frame that a server received. Data comes back as a view into `raw`. InvalidRequestError if it is neither."""
    return _payload(raw) or _parsed(raw, pb.ExchangeRequest)


def decode_response(raw: bytes) -> pb.ExchangeResult | memoryview:
    """A frame that a client received, as decode_request."""
    return _payload(raw) or _parsed(raw, pb.ExchangeResponse)


def chunks(views: Iterable[memoryview], size: int = FRAME_BYTES) -> Iterator[bytes]:
    """Data frames with all bytes of `views` in order, each but the last with `size` bytes; none for no bytes."""
    parts: list[memoryview] = []
    room = size
    for view in map(_flat, views):
        position = 0
        while position < view.nbytes:
            part = view[position : position + room]
            parts.append(part)
            position, room = position + part.nbytes, room - part.nbytes
            if not room:
                yield encode_data(*parts)
                parts, room = [], size
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
        """Takes the next bytes of the stream. InvalidRequestError, and nothing written, if they do not all fit."""
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
    """Calls Exchange with raw frames. `ask` is for requests of one frame: the same on the wire, without a thread."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.stream: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(EXCHANGE)
        self.ask: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(EXCHANGE)


Behaviour = Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]


def add_parameter_server_to_server(servicer: Any, server: grpc.Server) -> None:
    """As the generated add_ParameterServerServiceServicer_to_server, but Exchange takes and yields raw frames.

    servicer.Exchange: iterator of bytes (decode_request reads them) and context to iterator of bytes.
    """
    exchange: Behaviour = servicer.Exchange
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Describe": _unary(servicer.Describe, pb.DescribeRequest),
        "Introduce": _unary(servicer.Introduce, pb.IntroduceRequest),
        "Exchange": grpc.stream_stream_rpc_method_handler(exchange),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def _unary(behaviour: Callable[..., Any], request: Any) -> "grpc.RpcMethodHandler[Any, Any]":
    return grpc.unary_unary_rpc_method_handler(
        behaviour,
        request_deserializer=request.FromString,
        response_serializer=lambda response: response.SerializeToString(),
    )


def _flat(view: memoryview) -> memoryview:
    if view.format == "B" and view.ndim == 1:
        return view
    return view.cast("B") if view.nbytes else memoryview(b"")


def _prefix(tag: int, length: int) -> bytes:
    out = bytearray((tag,))
    while length > 0x7F:
        out.append(length & 0x7F | 0x80)
        length >>= 7
    out.append(length)
    return bytes(out)


def _payload(raw: bytes) -> memoryview | None:
    """The payload where the frame is exactly one `data` field; None for everything else, also for no bytes."""
    if not raw or raw[0] != DATA_TAG:
        return None
    length, position, shift = 0, 1, 0
    while position < len(raw) and shift < 35:
        byte = raw[position]
        length |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return memoryview(raw)[position:] if length and position + length == len(raw) else None
    return None


def _parsed(raw: bytes, kind: Any) -> Any:
    try:
        frame = kind.FromString(raw)
    except DecodeError as error:
        raise InvalidRequestError(f"not an Exchange frame: {error}") from error
    match frame.WhichOneof("frame"):
        case "header":
            return frame.header
        case "data":
            return memoryview(frame.data)
        case _:
            raise InvalidRequestError("an Exchange frame with neither header nor data")
