"""Where the pieces of an open push belong, and what is missing."""

from collections.abc import Collection, Iterable

from pscommon.core.errors import InvalidRequestError
from psserver.parameters.staging import Staging


class OpenPushReceiver:
    """Where the pieces of a push belong that begins before it is complete, and what is missing."""

    def __init__(self, staging: Staging) -> None:
        """Raises InvalidRequestError if this push cannot be open."""
        if staging.absent or staging.named_parts or not staging.is_server_memory:
            raise InvalidRequestError(
                "an open push names absent tensors at its end, has the raw bytes of the model, "
                "and uses no shared memory"
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
