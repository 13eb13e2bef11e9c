"""A flat buffer whose large tensors lie in arrays of the caller, which saves a copy."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping

from pscommon.core.partition import ByteRange


class ScatteredBuffer:
    """Bytes of a flat buffer, of which some ranges lie elsewhere.

    Attributes:
        nbytes: Size of the flat buffer.
        readonly: Whether a part cannot be written.
        format: "B", as of a memoryview of bytes.
    """

    format = "B"

    def __init__(self, flat: memoryview, parts: Mapping[int, memoryview]) -> None:
        """Create the buffer.

        Args:
            flat: The bytes that lie in no part.
            parts: Bytes by their position in the flat buffer; they do not overlap.
        """
        self.nbytes = flat.nbytes
        self.readonly = flat.readonly or any(part.readonly for part in parts.values())
        self._flat = flat
        self._starts = sorted(parts)
        self._parts = [parts[start] for start in self._starts]

    def cut(self, span: ByteRange) -> Iterator[memoryview]:
        """Yield the memory of a byte range, in order."""
        position = span.start
        for index in range(max(0, bisect_right(self._starts, position) - 1), len(self._starts)):
            start, part = self._starts[index], self._parts[index]
            if start >= span.stop:
                break
            if position < start:
                yield self._flat[position:start]
                position = start
            if position < (stop := min(start + part.nbytes, span.stop)):
                yield part[position - start : stop - start]
                position = stop
        if position < span.stop:
            yield self._flat[position : span.stop]


ExchangeBuffer = memoryview | ScatteredBuffer
