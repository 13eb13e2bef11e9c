"""Weights on their way out. A reading shows one version from its first byte to its last,
whatever is applied meanwhile.

Its frames are made when they are sent, from the weights themselves. Before these change, whoever
changes them calls `freeze`: readings that are not through get a copy, one for all of them. So an
update never waits for a slow receiver, and nothing is copied in the common case, where everybody
has received before the next update.
"""

import threading
from collections.abc import Callable, Iterator, Sequence

from pscommon.wire.channel import FRAME_BYTES
from pscommon.wire.frames import encode_data
from psserver.parameters.partition import RoleBuffers, Span, raw


class WeightReads:
    """All readings of one shard. copy: makes a copy of the weights that step; free: takes its
    memory back.
    """

    def __init__(
        self, copy: Callable[[], RoleBuffers], free: Callable[[RoleBuffers], None]
    ) -> None:
        self._copy, self._free = copy, free
        self._lock = threading.Lock()
        self._live: set[WeightRead] = set()
        self._users: dict[int, int] = {}

    def open(self, weights: RoleBuffers, spans: Sequence[Span]) -> "WeightRead":
        """Only while nothing changes the weights."""
        reading = WeightRead(self._encode, self._close, weights, spans)
        with self._lock:
            self._live.add(reading)
        return reading

    def freeze(self) -> None:
        """The weights are about to change."""
        with self._lock:
            live, self._live = self._live, set()
            live = {reading for reading in live if reading.left}
            if not live:
                return
            copy = self._copy()
            self._users[id(copy)] = len(live)
            for reading in live:
                reading.memory, reading.frozen = RoleBuffers({**reading.memory, **copy}), copy

    def _encode(self, reading: "WeightRead", spans: Sequence[Span]) -> bytes:
        with self._lock:
            memory = reading.memory
            reading.left -= sum(stop - start for _, start, stop in spans)
            return encode_data(*(raw(memory[role][start:stop]) for role, start, stop in spans))

    def _close(self, reading: "WeightRead") -> None:
        with self._lock:
            self._live.discard(reading)
            frozen, reading.frozen = reading.frozen, None
            if frozen is None:
                return
            self._users[id(frozen)] -= 1
            if not self._users[id(frozen)]:
                del self._users[id(frozen)]
                self._free(frozen)


class WeightRead:
    """One pull's bytes. To be closed, whether it was read to its end or not. left: bytes that no
    frame has yet.
    """

    def __init__(
        self,
        encode: Callable[["WeightRead", Sequence[Span]], bytes],
        close: Callable[["WeightRead"], None],
        weights: RoleBuffers,
        spans: Sequence[Span],
    ) -> None:
        self.memory = weights
        self.frozen: RoleBuffers | None = None
        self.nbytes = self.left = sum(stop - start for _, start, stop in spans)
        self._encode = encode
        self._close = close
        self._spans = spans

    def frames(self, size: int = FRAME_BYTES) -> Iterator[bytes]:
        """Data frames with all bytes in order, `size` in each; each is made when it is asked
        for.
        """
        for spans in _grouped(self._spans, size):
            yield self._encode(self, spans)

    def views(self) -> list[memoryview]:
        """All bytes, where they lie; only while nothing changes the weights."""
        return [self.memory.raw(*span).toreadonly() for span in self._spans]

    def close(self) -> None:
        """Harmless to repeat."""
        self._close(self)


def _grouped(spans: Sequence[Span], size: int) -> Iterator[list[Span]]:
    """The spans, cut so that each group but the last has `size` bytes."""
    group: list[Span] = []
    room = size
    for role, start, stop in spans:
        while start < stop:
            taken = min(room, stop - start)
            group.append((role, start, start + taken))
            start, room = start + taken, room - taken
            if not room:
                yield group
                group, room = [], size
    if group:
        yield group
