"""Count the bytes that move between workers and one shard, and note which workers are active."""

import time
from collections.abc import Iterator

from psserver.process.metrics import ServerMetrics
from psserver.shard.observers import ShardObserver


class TransferStats(ShardObserver):
    """Transfer counters of one shard.

    received_bytes: bytes of pushes so far.
    sent_bytes: bytes of weights so far.
    """

    def __init__(self, metrics: ServerMetrics) -> None:
        self.received_bytes = self.sent_bytes = 0
        self._metrics = metrics
        self._last_active: dict[int, float] = {}

    def on_receive(self, nbytes: int) -> None:
        self.received_bytes += nbytes
        self._metrics.count_bytes(received=nbytes)

    def count_sent(self, nbytes: int) -> None:
        self.sent_bytes += nbytes
        self._metrics.count_bytes(sent=nbytes)

    def note_request(self, worker: int) -> None:
        """Note a request of this worker, with or without all its bytes."""
        self._last_active[worker] = time.monotonic()

    def watch_frames(self, worker: int, frames: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the frames; each one that moves shows that the worker is alive."""
        for frame in frames:
            yield frame
            self._last_active[worker] = time.monotonic()

    def take_active_workers(self) -> dict[int, float]:
        """Return the workers active since the last call: worker -> seconds since its last frame."""
        active, self._last_active = self._last_active, {}
        now = time.monotonic()
        return {worker: now - at for worker, at in active.copy().items()}
