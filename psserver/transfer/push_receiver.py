"""Receive a push: copy the bytes of its frames straight into its staging."""

from collections.abc import Collection, Iterable, Iterator
from itertools import chain

from pscommon.core.errors import InvalidRequestError
from pscommon.wire.frames import Filler, Frame, decode_request
from psproto.v1 import parameter_server_pb2 as pb
from psserver.parameters.staging import Staging


def receive(staging: Staging, first: memoryview, frames: Iterator[bytes]) -> None:
    """Receive a push in order: the data with the header, then the data of the other frames."""
    filler = Filler(staging.views)
    for data in _data_in_order(first, frames):
        filler.fill(data)
        staging.mark_filled(staging.nbytes - filler.missing)
    if not filler.complete:
        raise InvalidRequestError(f"the push ended {filler.missing} bytes early")


def _data_in_order(first: memoryview, frames: Iterator[bytes]) -> Iterator[memoryview]:
    yield first
    for frame in map(decode_request, frames):
        if frame.header is not None:
            raise InvalidRequestError("a second header in one Exchange")
        yield frame.data


def receive_open(
    staging: Staging, first: Frame[pb.PushPullHeader], frames: Iterator[bytes]
) -> pb.PushPullHeader:
    """Receive an open push, whose frames name their positions. Return its closing header."""
    receiver = OpenPushReceiver(staging)
    for frame in chain([first._replace(header=None)], map(decode_request, frames)):
        Filler(receiver.views_at(frame.offset, frame.data.nbytes)).fill(frame.data)
        receiver.received(frame.offset, frame.data.nbytes)
        if frame.header is not None:
            receiver.close(frame.header.absent)
            return frame.header
    raise InvalidRequestError("the push ended without the header that closes it")


class OpenPushReceiver:
    """Where the pieces of a push belong that begins before it is complete, and what is missing."""

    def __init__(self, staging: Staging) -> None:
        """Raises InvalidRequestError if this push cannot be open."""
        if staging.absent or not staging.is_server_memory:
            raise InvalidRequestError(
                "an open push names absent tensors at its end, and uses no shared memory"
            )
        self._staging, self._coverage = staging, Coverage()

    def views_at(self, offset: int, nbytes: int) -> list[memoryview]:
        """Return the memory for a piece of the push."""
        found, missing = [], nbytes
        for view in self._staging.views:
            if offset < view.nbytes and missing:
                part = view[offset : offset + missing]
                found.append(part)
                missing, offset = missing - part.nbytes, offset + part.nbytes
            offset = max(0, offset - view.nbytes)
        if missing:
            raise InvalidRequestError(f"the push has {missing} bytes more than the model")
        return found

    def received(self, offset: int, nbytes: int) -> None:
        """Record that a piece is complete."""
        self._coverage.add(offset, offset + nbytes)

    def close(self, absent: Collection[int]) -> None:
        """Record the end of the push. Raises InvalidRequestError if bytes are missing."""
        self._staging.close(absent)
        if missing := self._coverage.missing(self._staging.required_ranges):
            raise InvalidRequestError(
                f"the push was closed without bytes {missing[0]} to {missing[1]}"
            )


class Coverage:
    """The bytes received so far, as few ranges."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def add(self, start: int, stop: int) -> None:
        if start == stop:
            return
        apart = [(a, b) for a, b in self._ranges if b < start or stop < a]
        joined = [(a, b) for a, b in self._ranges if b >= start and stop >= a]
        start, stop = min([start, *(a for a, _ in joined)]), max([stop, *(b for _, b in joined)])
        self._ranges = sorted([*apart, (start, stop)])

    def missing(self, needed: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
        """Return the first needed range that is not received completely."""
        for start, stop in needed:
            if start < stop and not any(a <= start and stop <= b for a, b in self._ranges):
                return start, stop
        return None
