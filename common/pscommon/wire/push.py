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
    target: What the ranges belong to: the flat buffer of the model.
    encoding: How their bytes are sent: as they are.
    """

    ranges: tuple[ByteRange, ...]
    target: "pb.Target.ValueType" = pb.TARGET_MODEL
    encoding: "pb.Encoding.ValueType" = pb.ENCODING_RAW


def parts_from_proto(messages: Iterable[pb.Part]) -> tuple[Part, ...]:
    """Decode the parts of a push.

    Raises:
        InvalidRequestError: A target or an encoding is unknown, or a range is none.
    """
    parts = []
    for message in messages:
        if message.target != pb.TARGET_MODEL:
            raise InvalidRequestError(f"this server knows no target {message.target} of a push")
        if message.encoding != pb.ENCODING_RAW:
            raise InvalidRequestError(f"this server knows no encoding {message.encoding} of a push")
        bounds = message.ranges
        if len(bounds) % 2:
            raise InvalidRequestError(f"{len(bounds)} numbers are no pairs of start and stop")
        pairs = zip(bounds[::2], bounds[1::2], strict=True)
        parts.append(Part(tuple(ByteRange(*pair) for pair in pairs)))
    return tuple(parts)


def parts_to_proto(parts: Sequence[Part]) -> list[pb.Part]:
    """Encode parts; see `parts_from_proto`."""
    return [
        pb.Part(
            target=part.target,
            encoding=part.encoding,
            ranges=chain.from_iterable(part.ranges),
        )
        for part in parts
    ]
