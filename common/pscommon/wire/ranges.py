"""The range of every integer of a request, and the check of it where a server decodes a message.

The check comes before the handler and before memory is taken. So no later code meets a number that
a field of the log, of a snapshot or of an answer cannot hold: a range leaves room for the successor
of a number, and for sums of it, wherever one is stored or sent. tests/law/test_ranges.py has the
fields that carry the numbers on.

Unknown values of enums are refused, too, without a row here.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, le, methodcaller
from typing import Any, NamedTuple, NoReturn

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from pscommon.core import limits
from pscommon.core.errors import InvalidRequestError
from pscommon.wire.requests import REQUESTS
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import model_pb2, shard_pb2, standby_pb2, stream_pb2
from psproto.v1 import parameter_server_pb2 as ps

U32, U64, I64 = range(2**32), range(2**64), range(-(2**63), 2**63)
"""All numbers of a type: they are only compared, or a later check depends on the job's state."""

COUNTER = range(2**63)
"""Numbers that grow by one: the next one fits 64 bits, with and without sign."""

LOOP = range(limits.MAX_LOOPS + 1)
SAMPLES = range(limits.MAX_SAMPLES_PER_PUSH + 1)
NBYTES = range(limits.MAX_SHARD_NBYTES + 1)
WAIT = range(limits.MAX_WAIT_MS + 1)
SHARD, SHARDS = range(limits.MAX_SHARDS), range(limits.MAX_SHARDS + 1)

RANGES: Mapping[type[Message], Mapping[str, range]] = {
    co.JoinRequest: {
        "rank": range(limits.MAX_RANK + 1),
        "pid": U32,
        "attempt": range(limits.MAX_ATTEMPT + 1),
        "format": U32,
        "wait_ms": WAIT,
    },
    co.RegisterRequest: {"worker": COUNTER, "wait_ms": WAIT, "seed": U64},
    model_pb2.TensorSpec: {"shape": COUNTER, "group": range(limits.MAX_TENSORS)},
    co.HeartbeatRequest: {"worker": COUNTER, "steps": COUNTER},
    co.ReportedValue: {"version": COUNTER},
    co.GetTraceRequest: {"after": U64},
    co.LeaveRequest: {"worker": COUNTER, "version": COUNTER},
    co.NextBatchRequest: {
        "worker": COUNTER,
        "count": range(limits.MAX_BATCHES_PER_REQUEST + 1),
        "wait_ms": WAIT,
        "received": COUNTER,
        "first_open": LOOP,
    },
    co.LoopSpec: {
        "loop": LOOP,
        "size": COUNTER,
        "batch_size": COUNTER,
        "epochs": U32,
        "seed": I64,
        "first_epoch": U32,
        "sources": U32,
        "batches": COUNTER,
    },
    co.ScriptPlace: {
        "pass_number": LOOP,
        "first_open": LOOP,
        "first_loader": LOOP,
        "training_passes": LOOP,
    },
    co.ReturnBatchesRequest: {"worker": COUNTER},
    # the job numbers named passes beyond those that a script may number; others are ignored
    ps.Batch: {"loop": U32, "number": COUNTER, "count": U32},
    co.CollectiveRequest: {
        "worker": COUNTER,
        "number": range(1, COUNTER.stop),
        "samples": SAMPLES,
        "wait_ms": WAIT,
        "first_open": LOOP,
    },
    co.ReduceRequest: {
        "worker": COUNTER,
        "number": COUNTER,
        "version": COUNTER,
        "samples": SAMPLES,
        "wait_ms": WAIT,
        "within": COUNTER,
        "completed": COUNTER,
    },
    co.ReportMetricsRequest: {"worker": COUNTER},
    co.SaveSnapshotRequest: {"wait_ms": WAIT},
    co.DrainRequest: {"worker": COUNTER},
    co.ScaleWorkersRequest: {"workers": range(1, limits.WORKERS_PER_GENERATION + 1)},
    co.RestoreSnapshotRequest: {"version": COUNTER, "wait_ms": WAIT},
    co.SetPolicyRequest: {"staleness": U32, "max_staleness": U32},
    co.ReshardRequest: {"shards": range(1, SHARDS.stop), "wait_ms": WAIT},
    co.LinkShardRequest: {
        "shard": SHARD,
        "shards": SHARDS,
        "term": COUNTER,
        "alive": COUNTER,
        "ended": COUNTER,
        "format": U32,
    },
    co.Report: {"index": COUNTER, "epoch": I64, "log_bytes": NBYTES, "digest": U64},
    co.Measured: {"index": COUNTER},
    co.Staged: {"samples": SAMPLES, "base": COUNTER, "reduce_round": COUNTER},
    co.PushKey: {"worker": COUNTER, "seq": COUNTER},
    co.SnapshotPart: {"version": COUNTER, "nbytes": NBYTES, "index": COUNTER},
    co.MoveResult: {"index": COUNTER, "nbytes": NBYTES},
    co.RestoreResult: {"version": COUNTER},
    ps.ExchangeRequest: {"offset": U64},
    ps.PushPullHeader: {
        "worker": COUNTER,
        "seq": COUNTER,
        "base": COUNTER,
        "samples": SAMPLES,
        "absent": U32,
        "min_version": COUNTER,
        "wait_ms": WAIT,
        "memory": U32,
        "have": COUNTER,
        "term": COUNTER,
        "shards": SHARDS,
        "reduce_round": COUNTER,
    },
    ps.Part: {"ranges": U64},
    shard_pb2.ReadShardRequest: {"epoch": I64, "index": COUNTER, "start": COUNTER, "stop": COUNTER},
    standby_pb2.ReplicateRequest: {
        "shard": SHARD,
        "shards": SHARDS,
        "term": COUNTER,
        "received": COUNTER,
        "format": U32,
    },
    standby_pb2.PromoteRequest: {"wait_ms": WAIT},
    stream_pb2.StreamHello: {"format": U32, "shard": SHARD, "worker": COUNTER, "term": COUNTER},
}
"""By message and field. A map has one row for its integers, which are its keys or its values."""

LENGTHS: Mapping[type[Message], Mapping[str, int]] = {
    model_pb2.ModelSpec: {"tensors": limits.MAX_TENSORS},
    model_pb2.TensorSpec: {"shape": limits.MAX_DIMENSIONS},
    co.HeartbeatRequest: {"values": limits.MAX_REPORTED_VALUES},
    co.LeaveRequest: {"values": limits.MAX_REPORTED_VALUES},
    co.ReportMetricsRequest: {"values": limits.MAX_REPORTED_VALUES},
    co.ScriptPlace: {"first_open": limits.MAX_LOADERS},
    co.ReturnBatchesRequest: {"batches": limits.MAX_BATCHES_PER_PUSH},
    co.LinkShardRequest: {"alive": limits.MAX_MEMBERS, "ended": limits.MAX_MEMBERS},
    co.Report: {"staged": limits.MAX_MEMBERS},
    co.Staged: {"batches": limits.MAX_BATCHES_PER_PUSH},
    ps.PushPullHeader: {
        "batches": limits.MAX_BATCHES_PER_PUSH,
        "absent": limits.MAX_TENSORS,
        "parts": limits.MAX_TENSORS,
    },
    ps.Part: {"ranges": 2 * limits.MAX_TENSORS},
}
"""The most items of a list or map with numbers: each item takes memory and time."""

REMEDIES: Mapping[str, str] = {
    "JoinRequest.rank": "set PS_WORKER_RANK to a smaller number",
    "JoinRequest.attempt": "unset PS_WORKER_ATTEMPT",
    "NextBatchRequest.count": "ask for fewer batches at a time",
    "LoopSpec.loop": "one loop for many passes: job.batches(epochs=N)",
    "ModelSpec.tensors": "join small tensors",
    "ScriptPlace.first_open": "one loader for many passes",
    "ReshardRequest.shards": "fewer servers",
}

OTHER_RELEASE = "the same release of paramserver on every machine of the job"


class _ListRule(NamedTuple):
    """What a list or map may have.

    Attributes:
        name: The field.
        length: The most items.
        integers: Returns its integers, the keys or values of a map; None: its items are messages.
        allowed: What its integers may be; None: every number of their type.
    """

    name: str
    length: int
    integers: Callable[[Any], Iterable[int]] | None
    allowed: range | None


class _Rules(NamedTuple):
    """What a message may have.

    Attributes:
        names: Fields with one integer, from 0 on, that may not be every number of its type.
        numbers: Returns their values.
        highest: Their largest numbers.
        others: Other fields with one integer or enum, and what it may be.
        messages: Fields with one message.
        lists: Lists and maps.
        items: Returns these lists and maps.
    """

    names: Sequence[str]
    numbers: Callable[[Any], Sequence[int]]
    highest: Sequence[int]
    others: Sequence[tuple[str, Collection[int]]]
    messages: Sequence[str]
    lists: Sequence[_ListRule]
    items: Callable[[Any], Sequence[Any]]


def check_ranges(message: Message) -> None:
    """Check the integers of a message, with those of the messages in it.

    A type of message that no server decodes is not checked.

    Raises:
        InvalidRequestError: A number is out of its range, the value of an enum is not known, or a
            list is too long. It names message, field, value and range.
    """
    rules = _RULES.get(type(message))
    if rules is None:
        return
    # few calls for many numbers: a small push is checked in 1.5 microseconds
    if not all(map(le, rules.numbers(message), rules.highest)):
        for name, highest in zip(rules.names, rules.highest, strict=True):
            _check_number(message, name, getattr(message, name), range(highest + 1))
    for name, known in rules.others:
        if (number := getattr(message, name)) not in known:
            _check_number(message, name, number, known)
    for name in rules.messages:
        if message.HasField(name):
            check_ranges(getattr(message, name))
    if rules.lists and any(rules.items(message)):
        for rule in rules.lists:
            if items := getattr(message, rule.name):
                _check_items(message, rule, items)


def _check_items(message: Message, rule: _ListRule, items: Any) -> None:
    if len(items) > rule.length:
        _refuse(message, rule.name, f"{len(items)} items are above {rule.length}")
    if rule.integers is None:
        for item in items:
            check_ranges(item)
    elif rule.allowed is not None:
        for number in rule.integers(items):
            _check_number(message, rule.name, number, rule.allowed)


def _check_number(message: Message, name: str, number: int, allowed: Collection[int]) -> None:
    if number in allowed:
        return
    if isinstance(allowed, range):
        bounds = f"{allowed[0]} and {allowed[-1]}"
        _refuse(message, name, f"{number} is not between {bounds}", "OUT_OF_RANGE")
    _refuse(message, name, f"this server knows no value {number}", "INVALID_REQUEST")


def _refuse(message: Message, name: str, problem: str, reason: str = "OUT_OF_RANGE") -> NoReturn:
    where = f"{message.DESCRIPTOR.name}.{name}"
    usual = "a number in this range" if reason == "OUT_OF_RANGE" else OTHER_RELEASE
    remedy = REMEDIES.get(where, usual)
    raise InvalidRequestError(f"{where} refused: {problem}. Try: {remedy}", reason)


# ---- rules from the tables -----------------------------------------------------------------------

INTEGERS: Mapping[int, range] = {
    FieldDescriptor.TYPE_UINT32: U32,
    FieldDescriptor.TYPE_UINT64: U64,
    FieldDescriptor.TYPE_INT64: I64,
    FieldDescriptor.TYPE_FIXED64: U64,
}
"""The integer types of proto/, and all their numbers."""


def _decoded_messages() -> Iterator[type[Message]]:
    """Yield the types of messages that servers decode, each once, with those inside them."""
    hello = stream_pb2.StreamHello, stream_pb2.CoordinatorRequest
    waiting: list[Descriptor] = [row.request.DESCRIPTOR for row in REQUESTS]
    waiting += [kind.DESCRIPTOR for kind in hello]
    found = set[str]()
    while waiting:
        descriptor = waiting.pop()
        if descriptor.full_name not in found:
            found.add(descriptor.full_name)
            if not descriptor.GetOptions().map_entry:
                yield GetMessageClass(descriptor)
            waiting += [each.message_type for each in descriptor.fields if each.message_type]


def _make_rules(kind: type[Message]) -> _Rules:
    ranges, lengths = RANGES.get(kind, {}), LENGTHS.get(kind, {})
    highest, others = dict[str, int](), list[tuple[str, Collection[int]]]()
    messages, lists = list[str](), list[_ListRule]()
    for field in kind.DESCRIPTOR.fields:
        name, inner, of_type = field.name, field.message_type, INTEGERS.get(field.type)
        if name in lengths:
            lists.append(_make_list_rule(field, lengths[name], ranges.get(name)))
        elif field.enum_type is not None:
            others.append((name, frozenset(field.enum_type.values_by_number)))
        elif inner is not None and field.default_value is None:
            messages.append(name)
        elif of_type is not None and ranges[name] != of_type:
            if ranges[name].start == of_type.start == 0:
                highest[name] = ranges[name][-1]
            else:
                others.append((name, ranges[name]))
    names = list(highest)
    return _Rules(
        names,
        _getter(names),
        list(highest.values()),
        others,
        messages,
        lists,
        _getter([rule.name for rule in lists]),
    )


def _make_list_rule(field: Any, length: int, allowed: range | None) -> _ListRule:
    """field: A FieldDescriptor, of either implementation."""
    of_type, entry = INTEGERS.get(field.type), field.message_type
    integers: Callable[[Any], Iterable[int]] | None = None
    if of_type is not None:
        integers = iter
    elif entry.GetOptions().map_entry:
        of_type = INTEGERS.get(entry.fields_by_name["value"].type)
        integers = methodcaller("keys" if of_type is None else "values")
    return _ListRule(field.name, length, integers, None if allowed == of_type else allowed)


def _getter(names: Sequence[str]) -> Callable[[Any], Any]:
    """Return a function that returns the values of these fields, and perhaps one of them twice."""
    # of one name, attrgetter returns a value instead of a tuple
    return attrgetter(*names, names[0]) if names else lambda message: ()


_RULES = {kind: _make_rules(kind) for kind in _decoded_messages()}

CHECKED: Collection[type[Message]] = _RULES.keys()
"""The types of messages that servers decode."""
