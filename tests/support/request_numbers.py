"""Messages with one number at an end of its range, or beyond it."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from pscommon.wire.ranges import INTEGERS, RANGES

Path = tuple[FieldDescriptor, ...]

LARGEST_ENUM = 2**31 - 1


class NumberCase(NamedTuple):
    """A number in a message.

    Attributes:
        path: The field, after those of the messages that it is in.
        number: The number.
        is_allowed: It is in its range.
    """

    path: Path
    number: int
    is_allowed: bool

    def __str__(self) -> str:
        return f"{'.'.join(field.name for field in self.path)}={self.number}"

    def put(self, base: Message) -> Message:
        """Return a copy of a message with this number."""
        made = type(base)()
        made.CopyFrom(base)
        node: Any = made
        for field in self.path[:-1]:
            node = getattr(node, field.name)
            if field.default_value == []:
                node = node[0] if node else node.add()
        _put(node, self.path[-1], self.number)
        return made


def cases(kind: type[Message], path: Path = ()) -> Iterator[NumberCase]:
    """Yield the ends of each range in a type of message, and the numbers beyond them."""
    for field in kind.DESCRIPTOR.fields:
        here, inner = (*path, field), field.message_type
        if field.name in RANGES.get(kind, {}):
            for number, is_allowed in _numbers(_scalar(field), RANGES[kind][field.name]):
                yield NumberCase(here, number, is_allowed)
        elif field.enum_type is not None:
            known = field.enum_type.values_by_number
            yield NumberCase(here, max(known), True)
            for number in (-1, max(known) + 1, LARGEST_ENUM):
                yield NumberCase(here, number, False)
        elif inner is not None and not inner.GetOptions().map_entry:
            yield from cases(GetMessageClass(inner), here)


def _numbers(scalar: FieldDescriptor, allowed: range) -> Iterator[tuple[int, bool]]:
    yield from ((number, True) for number in sorted({allowed[0], allowed[-1]}))
    of_type = INTEGERS[scalar.type]
    for number in sorted({of_type[0], allowed[0] - 1, allowed[-1] + 1, of_type[-1]}):
        if number in of_type and number not in allowed:
            yield number, False


def _scalar(field: FieldDescriptor) -> FieldDescriptor:
    """Return the field of the integers: of a map, that of its keys or values."""
    if field.message_type is None:
        return field
    parts: Sequence[FieldDescriptor] = field.message_type.fields
    return next(part for part in reversed(parts) if part.type in INTEGERS)


def _put(node: Any, field: FieldDescriptor, number: int) -> None:
    values = getattr(node, field.name)
    if field.message_type is not None:
        if _scalar(field).name == "key":
            values[number] = 0.0
        else:
            values["some"] = number
    elif field.default_value == []:
        values.append(number)
    else:
        setattr(node, field.name, number)
