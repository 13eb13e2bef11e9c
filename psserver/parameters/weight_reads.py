"""Read weights for sending. A read shows one version from its first byte to its last.

Frames are made from the weights themselves at the moment they are sent. Before an update changes
the weights it calls `freeze`: unfinished reads get a copy, one for all of them. So an update never
waits for a slow receiver, and usually, when all receivers are done, nothing is copied.
"""

import threading
from collections.abc import Callable, Iterator, Sequence

from pscommon.wire.channel import FRAME_BYTES
from pscommon.wire.frames import encode_data
from psserver.parameters.partition import RoleBuffers, Span, raw


class WeightReads:
    """All reads of one shard.

    copy: returns a copy of the weights that an update may change.
    free: takes the copy's memory back.
    """

    def __init__(
        self, copy: Callable[[], RoleBuffers], free: Callable[[RoleBuffers], None]
    ) -> None:
        self._copy, self._free = copy, free
        self._lock = threading.Lock()
        self._open_reads: set[WeightRead] = set()
        self._read_counts: dict[int, int] = {}

    def open(self, weights: RoleBuffers, spans: Sequence[Span]) -> "WeightRead":
        """Open a read. Call it only while nothing changes the weights."""
        read = WeightRead(self._encode, self._close, weights, spans)
        with self._lock:
            self._open_reads.add(read)
        return read

    def freeze(self) -> None:
        """Give unfinished reads a copy: the weights are about to change."""
        with self._lock:
            open_reads, self._open_reads = self._open_reads, set()
            open_reads = {read for read in open_reads if read.remaining_nbytes}
            if not open_reads:
                return
            frozen_weights = self._copy()
            self._read_counts[id(frozen_weights)] = len(open_reads)
            for read in open_reads:
                read.memory, read.frozen_copy = (
                    RoleBuffers({**read.memory, **frozen_weights}),
                    frozen_weights,
                )

    def _encode(self, read: "WeightRead", spans: Sequence[Span]) -> bytes:
        with self._lock:
            memory = read.memory
            read.remaining_nbytes -= sum(stop - start for _, start, stop in spans)
            return encode_data(*(raw(memory[role][start:stop]) for role, start, stop in spans))

    def _close(self, read: "WeightRead") -> None:
        with self._lock:
            self._open_reads.discard(read)
            frozen_copy, read.frozen_copy = read.frozen_copy, None
            if frozen_copy is None:
                return
            self._read_counts[id(frozen_copy)] -= 1
            if not self._read_counts[id(frozen_copy)]:
                del self._read_counts[id(frozen_copy)]
                self._free(frozen_copy)


class WeightRead:
    """The bytes of one pull. It must be closed, even if not all was read.

    remaining_nbytes: bytes that are in no frame yet.
    """

    def __init__(
        self,
        encode: Callable[["WeightRead", Sequence[Span]], bytes],
        close: Callable[["WeightRead"], None],
        weights: RoleBuffers,
        spans: Sequence[Span],
    ) -> None:
        self.memory = weights
        self.frozen_copy: RoleBuffers | None = None
        self.nbytes = self.remaining_nbytes = sum(stop - start for _, start, stop in spans)
        self._encode = encode
        self._close = close
        self._spans = spans

    def frames(self, size: int = FRAME_BYTES) -> Iterator[bytes]:
        """Yield data frames of `size` bytes, in order; each is made when it is requested."""
        for spans in _group_spans(self._spans, size):
            yield self._encode(self, spans)

    def views(self) -> list[memoryview]:
        """Return all bytes without copying; only while nothing changes the weights."""
        return [self.memory.raw(*span).toreadonly() for span in self._spans]

    def close(self) -> None:
        """Close the read. Repeating it is harmless."""
        self._close(self)


def _group_spans(spans: Sequence[Span], size: int) -> Iterator[list[Span]]:
    """Cut the spans into groups of `size` bytes; the last may be smaller."""
    group: list[Span] = []
    remaining = size
    for role, start, stop in spans:
        while start < stop:
            taken_nbytes = min(remaining, stop - start)
            group.append((role, start, start + taken_nbytes))
            start, remaining = start + taken_nbytes, remaining - taken_nbytes
            if not remaining:
                yield group
                group, remaining = [], size
    if group:
        yield group
