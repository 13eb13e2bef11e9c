"""The parts of a push: which bytes of what its data has."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from pscommon.core.errors import InvalidRequestError
from pscommon.core.partition import ByteRange
from psproto.v1 import parameter_server_pb2 as pb


class Part(NamedTuple):
    """Some bytes of a push.

    ranges: Byte ranges of the target, in the order of the data.
    target: What the ranges belong to: the flat buffer of the model, or an optimizer state like it.
    encoding: How their bytes are sent: as they are.
    state: torch's name of the optimizer state; empty: the target is none.
    """

    ranges: tuple[ByteRange, ...]
    target: "pb.Target.ValueType" = pb.TARGET_MODEL
    encoding: "pb.Encoding.ValueType" = pb.ENCODING_RAW
    state: str = ""


def parts_from_proto(messages: Iterable[pb.Part]) -> tuple[Part, ...]:
    """Decode the parts of a push.

    Raises:
        InvalidRequestError: A target or an encoding is unknown, a state has no name, or a range
            is none.
    """
    parts = []
    for message in messages:
        if message.target not in (pb.TARGET_MODEL, pb.TARGET_STATE):
            raise InvalidRequestError(f"this server knows no target {message.target} of a push")
        if message.encoding != pb.ENCODING_RAW:
            raise InvalidRequestError(f"this server knows no encoding {message.encoding} of a push")
        if (message.target == pb.TARGET_STATE) != bool(message.state):
            raise InvalidRequestError("a part of a push has a state without its name")
        bounds = message.ranges
        if len(bounds) % 2:
            raise InvalidRequestError(f"{len(bounds)} numbers are no pairs of start and stop")
        pairs = zip(bounds[::2], bounds[1::2], strict=True)
        ranges = tuple(ByteRange(*pair) for pair in pairs)
        parts.append(Part(ranges, message.target, message.encoding, message.state))
    return tuple(parts)


def parts_to_proto(parts: Sequence[Part]) -> list[pb.Part]:
    """Encode parts; see `parts_from_proto`."""
    return [
        pb.Part(
            target=part.target,
            encoding=part.encoding,
            ranges=chain.from_iterable(part.ranges),
            state=part.state,
        )
        for part in parts
    ]
