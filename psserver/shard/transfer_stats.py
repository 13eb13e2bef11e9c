"""What moves between the workers and one shard: how much, and whose."""

import time
from collections.abc import Iterator

from psserver.process.metrics import ServerMetrics


class TransferStats:
    """received_bytes, sent_bytes: of pushes and of weights, so far."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self.received_bytes = self.sent_bytes = 0
        self._metrics = metrics
        self._moved: dict[int, float] = {}

    def received(self, nbytes: int) -> None:
        self.received_bytes += nbytes
        self._metrics.moved(received=nbytes)

    def sent(self, nbytes: int) -> None:
        self.sent_bytes += nbytes
        self._metrics.moved(sent=nbytes)

    def asked(self, worker: int) -> None:
        """A request of this worker has come, with or without all its bytes."""
        self._moved[worker] = time.monotonic()

    def watched(self, worker: int, frames: Iterator[bytes]) -> Iterator[bytes]:
        """The frames of this worker's push, or those that it gets: each that has gone its way
        shows that it lives.
        """
        for frame in frames:
            yield frame
            self._moved[worker] = time.monotonic()

    def alive(self) -> dict[int, float]:
        """Workers whose frames have moved since this was last asked, and how many seconds ago."""
        moved, self._moved = self._moved, {}
        now = time.monotonic()
        return {worker: now - at for worker, at in moved.copy().items()}
