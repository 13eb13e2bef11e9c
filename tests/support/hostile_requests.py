"""Hostile requests: valid messages with hostile fields, or bytes that are no messages at all."""

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

from pscommon.wire.ranges import INTEGERS, LENGTHS, RANGES
from pscommon.wire.requests import REQUESTS, STREAM_FIELDS, AnyRequest
from pscommon.wire.stream_format import MAGIC, FrameKind, encode_frame
from psproto.v1 import stream_pb2

Draw = Callable[[st.SearchStrategy[Any]], Any]
Bases = Mapping[AnyRequest, Any]

MAX_CHANGES_COUNT = 4
MAX_REPEATED_NBYTES = 50
"""Size of an item that may come many times."""

LONG_WAIT_MS = 10_000

TEXTS = (
    "",
    "x",
    "\0",
    "../../etc/passwd",
    "\N{RIGHT-TO-LEFT OVERRIDE}\N{SNOWMAN}\n{}%s",
    "null",
    "{}",
    "[]",
    "[{}]",
    '[{"lr": 1e999}]',
    '[{"lr": NaN}]',
    '{"a": {"a": [1, null]}}',
    '"' + "x" * 70_000 + '"',
    "[" * 100_000,
    '{"a":' * 50_000,
    "9" * 10_000,
    "barrier",
    "all_reduce",
    "broadcast",
    "async",
    "x" * 257,
    "x" * 2_001,
    "x" * 70_000,
    "\N{SNOWMAN}" * 400_000,
)
FLOATS = (0.0, -1.0, 1e308, 5e-324, float("nan"), float("inf"), float("-inf"))
UNKNOWN_FIELDS = (
    b"\xf8\xff\xff\xff\x0f\x01",  # the largest field number
    b"\x9a\x3f\x04abcd",
    b"\x9b\x3f" * 90 + b"\x9c\x3f" * 90,  # groups in groups
    b"\x9b\x3f" * 20_000,
    b"\x08" + b"\xff" * 9 + b"\x01",  # field 1 as the largest number, whatever it is
    b"\x0a\xff\xff\xff\xff\x07",  # field 1 with 2 GB that do not follow
)


class Sent(NamedTuple):
    """One call. `frames`: the messages that are sent; `who`: the sender's index."""

    row: AnyRequest
    frames: tuple[bytes, ...]
    who: int

    @property
    def may_wait(self) -> bool:
        """The server may keep the call until its deadline."""
        for raw in self.frames:
            try:
                message: Any = self.row.request.FromString(raw)
            except Exception:
                continue
            message = message.header if self.row.is_framed else message
            if getattr(message, "wait_ms", 0):
                return True
        return False


def calls(bases: Bases, senders: int) -> st.SearchStrategy[Sent]:
    """Return a strategy of calls of all rows, by this number of senders."""

    @st.composite
    def call(draw: Draw) -> Sent:
        row = draw(st.sampled_from(REQUESTS))
        number = 1 if row.kind.startswith("unary") else draw(st.integers(0, 3))
        frames = tuple(draw(encoded(bases[row])) for _ in range(number))
        return Sent(row, frames, draw(st.integers(0, senders - 1)))

    return call()


@st.composite
def encoded(draw: Draw, base: Message) -> bytes:
    """Draw the bytes of a hostile message, most of which can be decoded."""
    form = draw(st.integers(0, 9))
    if form == 0:
        return bytes(draw(st.binary(max_size=200)))
    raw: bytes = draw(changed(base)).SerializeToString()
    if form == 1:
        return raw + bytes(draw(st.sampled_from(UNKNOWN_FIELDS)))
    if form in (2, 3):  # what is drawn must not depend on the job: here it would on the length
        place, byte = draw(st.integers(0, 999)) * len(raw) // 1000, draw(st.integers(0, 255))
        return raw[:place] + (bytes([byte]) + raw[place + 1 :] if form == 2 else b"")
    if form == 4:
        return raw + raw
    return raw


@st.composite
def changed(draw: Draw, base: Message) -> Message:
    """Draw a copy of a message with a few hostile fields."""
    made = type(base)()
    made.CopyFrom(base)
    for _ in range(draw(st.integers(0, MAX_CHANGES_COUNT))):
        _change(draw, made)
    return made


def _change(draw: Draw, message: Any) -> None:
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    field = draw(st.sampled_from(list(fields)))
    inner, name = field.message_type, field.name
    if field.default_value == []:
        _change_items(draw, message, field)
    elif inner is not None:
        if draw(st.integers(0, 4)):
            getattr(message, name).SetInParent()
            _change(draw, getattr(message, name))
        else:
            message.ClearField(name)
    else:
        setattr(message, name, draw(_values(type(message), field)))


def _change_items(draw: Draw, message: Any, field: FieldDescriptor) -> None:
    inner, name = field.message_type, field.name
    items = getattr(message, name)
    if inner is not None and inner.GetOptions().map_entry:
        of_keys, of_values = inner.fields
        for _ in range(draw(st.integers(1, 3))):
            key = draw(_values(type(message), of_keys, name))
            items[key] = draw(_values(type(message), of_values, name))
        return
    if draw(st.integers(0, 9)) == 0:
        message.ClearField(name)
    elif inner is not None:
        item = items.add()
        _change(draw, item)
        if item.ByteSize() < MAX_REPEATED_NBYTES and draw(st.integers(0, 9)) == 0:
            items.extend([item] * _many(draw, message, name))
    else:
        value = draw(_values(type(message), field))
        items.extend([value] * draw(st.integers(1, 3)))
        if len(str(value)) < MAX_REPEATED_NBYTES and draw(st.integers(0, 9)) == 0:
            items.extend([value] * _many(draw, message, name))


def _many(draw: Draw, message: Message, name: str) -> int:
    limit = LENGTHS.get(type(message), {}).get(name, 1000)
    return int(draw(st.sampled_from((limit - 1, limit, 2 * limit))))


def _values(
    kind: type[Message], field: FieldDescriptor, row_name: str = ""
) -> st.SearchStrategy[Any]:
    """row_name: The map that the field is the key or the value of."""
    if field.enum_type is not None:
        return st.sampled_from((*field.enum_type.values_by_number, -1, 99, 2**31 - 1))
    if field.type in INTEGERS:
        of_type = INTEGERS[field.type]
        allowed = RANGES.get(kind, {}).get(row_name or field.name, of_type)
        ends = {0, 1, 2, of_type[0], of_type[-1], allowed[0], allowed[-1]}
        ends |= {allowed[0] - 1, allowed[-1] + 1, allowed[-1] // 2}
        if field.name == "wait_ms":  # more would fill the servers with calls that wait
            ends = {0, LONG_WAIT_MS, allowed[-1] + 1, of_type[-1]}
        return st.sampled_from(sorted(number for number in ends if number in of_type))
    if field.type == FieldDescriptor.TYPE_STRING:
        return st.one_of(st.sampled_from(TEXTS), st.text(max_size=20))
    if field.type == FieldDescriptor.TYPE_BYTES:
        sizes = st.sampled_from((0, 1, 8, 40, 640, 8192, 1 << 20))
        return st.one_of(st.binary(max_size=40), sizes.map(bytes))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    return st.sampled_from(FLOATS)


# ---- byte strings --------------------------------------------------------------------------------

HEAD = struct.Struct("<BxxxIQQ")
NUMBERS = (0, 1, 127, 128, 1 << 16, 1 << 20, 8 << 20, 2**31, 2**32 - 1)
SIZES = (*NUMBERS, 2**63, 2**64 - 1)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HTTP = (
    b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /metrics?name[]=x&name[]=%ff HTTP/1.0\r\nAccept: text/plain;version=x\r\n\r\n",
    b"POST /livez HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n",
    b"GET /" + b"a" * 20_000,
    b"GET http://[::1 HTTP/1.1\r\nHost: [\r\n\r\n",
    b"GET / HTTP/1.1\r\nAuthorization: Basic \xff\xff\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300),
)


@st.composite
def frame(draw: Draw) -> bytes:
    """Draw a frame of any kind with any lengths."""
    kind = draw(st.one_of(st.sampled_from(list(map(int, FrameKind))), st.integers(0, 255)))
    message = draw(st.binary(max_size=40))
    if draw(st.booleans()):
        return encode_frame(FrameKind.DATA, message, len(message)) + bytes(len(message))
    nbytes, data = draw(st.sampled_from(NUMBERS)), draw(st.sampled_from(SIZES))
    head = HEAD.pack(kind, nbytes, data, draw(st.sampled_from(SIZES)))
    return (head + bytes(message)).ljust(128, b"\0") + bytes(draw(st.binary(max_size=200)))


@st.composite
def grpc_call(draw: Draw) -> bytes:
    """Draw a call with any bytes as its path and in its metadata."""
    path = draw(st.sampled_from((b"/\xff\xfe", b"/", *(row.path.encode() for row in REQUESTS))))
    names = (b"authorization", b"ps-worker-key-bin", b"grpc-timeout", b"content-type", b"x-bin")
    fields = [(b"content-type", b"application/grpc"), (b"te", b"trailers")]
    fields += draw(st.lists(st.tuples(st.sampled_from(names), st.binary(max_size=20)), max_size=2))
    head = b"\x83\x86" + b"\x04" + _text(path) + b"\x01" + _text(b"a")  # POST, http, path, host
    head += b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)
    frames = ((4, 0, 0, b""), (1, 4, 1, head), (0, 1, 1, bytes(5)))
    return PREFACE + b"".join(
        struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body
        for kind, flags, stream, body in frames
    )


def _text(value: bytes) -> bytes:
    return bytes([len(value)]) + value


@st.composite
def http2(draw: Draw) -> bytes:
    """Draw the beginning of a gRPC connection with any frames."""
    parts = [PREFACE]
    for _ in range(draw(st.integers(0, 8))):
        body = draw(st.binary(max_size=60))
        length = draw(st.sampled_from((len(body), len(body), 0, 2**24 - 1)))
        head = struct.pack(">I", length)[1:] + bytes(draw(st.binary(min_size=2, max_size=2)))
        parts.append(head + struct.pack(">I", draw(st.sampled_from((0, 1, 3, 2**31)))) + body)
    return b"".join(parts)


def byte_strings() -> st.SearchStrategy[bytes]:
    """Return a strategy of what a peer without a greeting sends to any port."""
    greeting = st.builds(
        lambda hello, nbytes: MAGIC + encode_frame(FrameKind.HELLO, hello, nbytes),
        encoded(stream_pb2.StreamHello(format=3)),
        st.sampled_from(SIZES),
    )
    return st.one_of(
        st.binary(max_size=300),
        st.sampled_from(HTTP),
        http2(),
        grpc_call(),
        frame().map(lambda sent: MAGIC + sent),
        greeting,
    )


def streams(bases: Bases) -> st.SearchStrategy[Sequence[bytes]]:
    """Return a strategy of what a worker sends after its greeting."""

    @st.composite
    def request(draw: Draw) -> bytes:
        row = draw(st.sampled_from(list(STREAM_FIELDS)))
        raw = draw(encoded(bases[row]))
        number = stream_pb2.CoordinatorRequest.DESCRIPTOR.fields_by_name[STREAM_FIELDS[row]].number
        message = bytes([number << 3 | 2]) + _varint(len(raw)) + raw
        return encode_frame(FrameKind.REQUEST, message)

    @st.composite
    def exchange(draw: Draw) -> bytes:
        base = next(base for row, base in bases.items() if row.is_framed)
        header = draw(changed(base.header)).SerializeToString()
        data = draw(st.sampled_from((base.data, base.data, b"", base.data[1:], base.data + b"\0")))
        return encode_frame(FrameKind.EXCHANGE, header, len(data)) + data

    return st.lists(st.one_of(frame(), request(), exchange()), min_size=1, max_size=4)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def greeting_message(job: str, shard: int, worker: int, key: bytes, token: str) -> bytes:
    """Return the greeting of a member."""
    hello = stream_pb2.StreamHello(
        format=3, job=job, shard=shard, worker=worker, key=key, token=token
    )
    return MAGIC + encode_frame(FrameKind.HELLO, hello.SerializeToString())
