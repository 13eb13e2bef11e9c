"""Receive a push: copy the bytes of its frames straight into its staging."""

from collections.abc import Iterable, Iterator
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
    if staging.absent or not staging.is_server_memory:
        raise InvalidRequestError(
            "an open push names absent tensors at its end, and uses no shared memory"
        )
    coverage = Coverage()
    for frame in chain([first._replace(header=None)], map(decode_request, frames)):
        _write(staging, frame)
        coverage.add(frame.offset, frame.offset + frame.data.nbytes)
        if frame.header is not None:
            staging.close(frame.header.absent)
            if missing := coverage.missing(staging.required_ranges):
                raise InvalidRequestError(
                    f"the push was closed without bytes {missing[0]} to {missing[1]}"
                )
            return frame.header
    raise InvalidRequestError("the push ended without the header that closes it")


def _write(staging: Staging, frame: Frame[pb.PushPullHeader]) -> None:
    position, data = frame.offset, frame.data
    for view in staging.views:
        if position < view.nbytes and data.nbytes:
            part = data[: view.nbytes - position]
            view[position : position + part.nbytes] = part
            data, position = data[part.nbytes :], position + part.nbytes
        position = max(0, position - view.nbytes)
    if data.nbytes:
        raise InvalidRequestError(f"the push has {data.nbytes} bytes more than the model")


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
