"""Read weights for sending. A read shows one version from its first byte to its last.

The bytes are taken from the weights themselves at the moment they are sent. Before an update
changes the weights it calls `freeze`: unfinished reads get a copy, one for all of them. So an
update never waits for a slow receiver, and usually, when all receivers are done, nothing is copied.
"""

import threading
from collections.abc import Callable, Iterator, Sequence

from pscommon.core.partition import ByteRange
from pscommon.parameters.partition import RoleBuffers, raw
from pscommon.wire.frames import FRAME_BYTES, encode_data


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

    def open(self, weights: RoleBuffers, spans: Sequence[ByteRange]) -> "WeightRead":
        """Open a read. Call it only while nothing changes the weights."""
        read = WeightRead(self._close, weights, spans)
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
                read.use_copy(frozen_weights)

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

    remaining_nbytes: bytes that were not taken yet.
    """

    def __init__(
        self,
        close: Callable[["WeightRead"], None],
        weights: RoleBuffers,
        spans: Sequence[ByteRange],
    ) -> None:
        self.memory = weights
        self.frozen_copy: RoleBuffers | None = None
        self.nbytes = self.remaining_nbytes = sum(span.nbytes for span in spans)
        self._close = close
        self._spans = spans
        self._remaining = [*reversed(spans)]
        self._lock = threading.Lock()

    def use_copy(self, frozen_weights: RoleBuffers) -> None:
        """Take the remaining bytes from a copy."""
        with self._lock:
            self.memory = RoleBuffers({**self.memory, **frozen_weights}, self.memory.ranges)
            self.frozen_copy = frozen_weights

    def take(self, nbytes: int, consume: Callable[[list[memoryview]], int]) -> None:
        """Pass views of the next bytes to `consume`, which returns the number that it has used.

        Updates of the weights wait for `consume`.
        """
        with self._lock:
            views = []
            for start, stop in reversed(self._remaining):
                span = ByteRange(start, min(stop, start + nbytes))
                views.append(raw(self.memory.bytes_of(span)))
                nbytes -= stop - start
                if nbytes <= 0:
                    break
            self._advance(consume(views))

    def _advance(self, nbytes: int) -> None:
        self.remaining_nbytes -= nbytes
        while nbytes:
            start, stop = self._remaining.pop()
            if nbytes < stop - start:
                self._remaining.append(ByteRange(start + nbytes, stop))
                return
            nbytes -= stop - start

    def frames(self, size: int = FRAME_BYTES) -> Iterator[bytes]:
        """Yield data frames of `size` bytes, in order; each is made when it is requested."""
        frames: list[bytes] = []

        def encode(views: list[memoryview]) -> int:
            frames.append(encode_data(*views))
            return sum(view.nbytes for view in views)

        while self.remaining_nbytes:
            self.take(size, encode)
            yield frames.pop()

    def views(self) -> list[memoryview]:
        """Return all bytes without copying; only while nothing changes the weights."""
        return [self.memory.raw(span).toreadonly() for span in self._spans]

    def close(self) -> None:
        """Close the read. Repeating it is harmless."""
        self._close(self)
