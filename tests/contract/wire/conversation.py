"""The recorded conversation of a worker, two servers and a standby, and the comparison of messages.

Values that differ between runs are masked: addresses by a placeholder per process, the log_id by
LOG_ID, and the fields in MASKED. `base` of LinkShardResponse depends only on time: it says which
entries were deleted.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from psproto.v1 import coordinator_pb2, parameter_server_pb2, shard_pb2, standby_pb2
from psproto.v1.standby_pb2 import ReplicateResponse

FIXTURE = Path(__file__).parents[2] / "fixtures" / "wire" / "conversation.json"

WORKER, SHARD_0, SHARD_1, STANDBY = "worker", "shard 0", "shard 1", "standby"

PLACEHOLDERS = {
    SHARD_0: "shard-0.invalid:1",
    SHARD_1: "shard-1.invalid:1",
    STANDBY: "standby.invalid:1",
}
"""Addresses in the fixture."""

LOG_ID = 7
"""The log's random number in the fixture."""

Kind = Literal["request", "closed", "answer", "end"]
"""closed: the client sends no more requests. end: the data is the name of the gRPC status code."""

STREAMS = {
    "/psproto.v1.CoordinatorService/LinkShard": SHARD_1,
    "/psproto.v1.StandbyService/Replicate": STANDBY,
}
"""Calls that stay open as long as both processes live, and their client; a worker makes all
other calls.
"""

HEARTBEAT = "/psproto.v1.CoordinatorService/Heartbeat"

JOIN = "/psproto.v1.CoordinatorService/Join"
EXCHANGE = "/psproto.v1.ParameterServerService/Exchange"

MASKED: Mapping[str, Mapping[str, object]] = {
    "JoinRequest": {"host": "machine", "pid": 1, "process": ""},
    "HeartbeatRequest": {
        "process": "",
        "step_seconds": 0.0,
        "samples_per_second": 0.0,
        "no_call_seconds": 0.0,
    },
    "RegisterRequest": {"wait_ms": 20_000},
    "NextBatchRequest": {"wait_ms": 20_000},
    "PushPullHeader": {"wait_ms": 20_000},
    "ExchangeResult": {
        "apply_seconds": 0.0,
        "wait_seconds": 0.0,
        "pull_seconds": 0.0,
        "waiting_for": "",
    },
    "DescribeResponse": {"version_text": ""},
    "LinkShardRequest": {"instance": "instance", "stats_json": "", "place": ""},
    "LinkShardResponse": {"waiting_for": "", "base": 0},
    "ReplicateRequest": {"instance": "instance"},
}
"""Fields by message, and the values that they have in the fixture."""

DROPPED = {
    "DescribeResponse": ("features",),
    "HeartbeatResponse": ("clock",),
    "LinkShardRequest": ("alive", "ended", "clock"),
    "LinkShardResponse": ("processes", "clock", "echo"),
}
"""Repeated fields whose contents depend on time or on the machine, or that are newer."""

LOG_IDS = {"Report": "epoch", "LinkShardResponse": "epoch"}
NO_LOG = -1

ONCE = (
    "entries",
    "model",
    "restore",
    "begin",
    "recover",
    "move",
    "restored",
    "snapshot_part",
    "moved",
)
"""Fields of a LinkShard stream that are sent once; all others repeat what holds."""


class Call(NamedTuple):
    method: str
    client: str
    server: str


class Event(NamedTuple):
    """A message of a call, or its end. data: serialized and masked."""

    call: int
    kind: Kind
    data: bytes


class Conversation(NamedTuple):
    """A recording.

    events: in their order.
    weights: by tensor, little-endian bytes of the last pull.
    numbers: weights and optimizer state of shard 0 and its standby, by kind and position.
    """

    calls: Sequence[Call]
    events: Sequence[Event]
    weights: Mapping[str, bytes]
    numbers: Mapping[str, bytes]

    def save(self, path: Path) -> None:
        raw = {
            "calls": [list(call) for call in self.calls],
            "events": [[event.call, event.kind, _text(event.data)] for event in self.events],
            "weights": {name: _text(data) for name, data in self.weights.items()},
            "numbers": {name: _text(data) for name, data in self.numbers.items()},
        }
        rows = [f"{json.dumps(key)}: {_rows(value)}" for key, value in raw.items()]
        path.write_text("{\n" + ",\n".join(rows) + "\n}\n")

    @staticmethod
    def load(path: Path) -> "Conversation":
        raw = json.loads(path.read_text())
        return Conversation(
            [Call(*call) for call in raw["calls"]],
            [Event(call, kind, base64.b64decode(data)) for call, kind, data in raw["events"]],
            {name: base64.b64decode(data) for name, data in raw["weights"].items()},
            {name: base64.b64decode(data) for name, data in raw["numbers"].items()},
        )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _rows(value: Any) -> str:
    """Yield one line per element, so that a diff shows single changes."""
    if isinstance(value, dict):
        return (
            "{\n"
            + ",\n".join(f"  {json.dumps(key)}: {json.dumps(each)}" for key, each in value.items())
            + "\n}"
        )
    return "[\n" + ",\n".join(f"  {json.dumps(each)}" for each in value) + "\n]"


def client_of(method: str) -> str:
    return STREAMS.get(method, WORKER)


_METHODS = {
    f"/{service.full_name}/{method.name}": method
    for file in (coordinator_pb2, parameter_server_pb2, shard_pb2, standby_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


def is_stream(method: str) -> bool:
    """Return whether a call has any number of requests."""
    return bool(_METHODS[method].client_streaming)


def parsed(method: str, kind: Kind, data: bytes) -> Message:
    """Return a parsed request or answer of this method."""
    descriptor = _METHODS[method]
    made = GetMessageClass(descriptor.input_type if kind == "request" else descriptor.output_type)()
    made.ParseFromString(data)
    return made


def encoded(message: Message) -> bytes:
    return message.SerializeToString(deterministic=True)


def masked(message: Message, addresses: Mapping[str, str]) -> Message:
    """Mask the message in place. addresses: placeholder by address."""
    for part in _parts(message):
        name = part.DESCRIPTOR.name
        for field, value in MASKED.get(name, {}).items():
            setattr(part, field, value)
        for field in DROPPED.get(name, ()):
            part.ClearField(field)
        if (field := LOG_IDS.get(name, "")) and getattr(part, field) != NO_LOG:
            setattr(part, field, LOG_ID)
        if isinstance(part, ReplicateResponse) and part.header.startswith(b"{"):
            part.header = json.dumps(_masked_json(json.loads(part.header)), sort_keys=True).encode()
    return replaced(message, addresses)


def _masked_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_masked_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    made = {key: _masked_value(key, each) for key, each in value.items()}
    if made.get("do") == "report":  # its second field is the log's number
        made["report"][1] = LOG_ID
    if made.get("do") == "report_values":  # the last field of each is a time
        made["values"] = [[*each[:3], 100.0] for each in made["values"]]
    return made


def _masked_value(key: str, value: Any) -> Any:
    if key == "now":
        return 100.0
    if key == "epoch" and value != NO_LOG:
        return LOG_ID
    return _masked_json(value)


def unmasked(message: Message, addresses: Mapping[str, str], log_id: int) -> Message:
    """Put real addresses and the log_id into a recorded message. addresses: by placeholder."""
    for part in _parts(message):
        field = LOG_IDS.get(part.DESCRIPTOR.name, "")
        if field and getattr(part, field) != NO_LOG:
            setattr(part, field, log_id)
    return replaced(message, addresses)


def replaced(message: Message, texts: Mapping[str, str]) -> Message:
    """Replace these texts in all string fields and in the JSON of standby records."""
    for part in _parts(message):
        for field, value in part.ListFields():
            if field.type == FieldDescriptor.TYPE_STRING and isinstance(value, str):
                setattr(part, field.name, _replaced(value, texts))
            elif field.type == FieldDescriptor.TYPE_STRING:
                value[:] = [_replaced(each, texts) for each in value]
        if isinstance(part, ReplicateResponse) and part.header.startswith(b"{"):
            part.header = _replaced(part.header.decode(), texts).encode()
    return message


def _replaced(text: str, texts: Mapping[str, str]) -> str:
    for old, new in texts.items():
        text = text.replace(old, new)
    return text


def _parts(message: Message) -> Sequence[Message]:
    """Return the message and all nested messages."""
    found = [message]
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE and not _is_map(field):
            for each in [value] if isinstance(value, Message) else value:
                found += _parts(each)
    return found


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


class RepetitionFilter:
    """Recognizes repeated messages of one direction of a stream. The messages must be masked."""

    def __init__(self) -> None:
        self._previous = b""

    def is_repeated(self, message: Message) -> bool:
        """Return whether this message contains nothing new."""
        if isinstance(message, ReplicateResponse):
            return message.number == 0
        fields = {field.name for field, _ in message.ListFields()}
        current = type(message)()
        current.CopyFrom(message)
        for name in ONCE:
            if name in current.DESCRIPTOR.fields_by_name:
                current.ClearField(name)
        before, self._previous = self._previous, encoded(current)
        return self._previous == before and not fields & set(ONCE)


def repeatable(message: Message) -> Message:
    """Return what a process repeats of its newest message while idle."""
    if isinstance(message, ReplicateResponse):
        return ReplicateResponse()
    copy = cast(Message, type(message)())
    copy.CopyFrom(message)
    for name in ONCE:
        if name in copy.DESCRIPTOR.fields_by_name:
            copy.ClearField(name)
    return copy
