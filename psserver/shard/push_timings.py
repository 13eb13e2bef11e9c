"""Measure how long pushes wait on a shard and how long their updates take."""

from collections.abc import Sequence
from typing import NamedTuple

from pscommon.core.log_entries import Apply, PushKey
from psserver.process.metrics import ServerMetrics


class PushTiming(NamedTuple):
    """Durations of one push.

    seq: the push's number.
    wait_seconds: time staged, until its update started.
    apply_seconds: duration of the update that applied it.
    """

    seq: int
    wait_seconds: float
    apply_seconds: float


class PushTimings:
    """Timings of each worker's newest applied push.

    apply_seconds: duration of all updates so far.
    """

    def __init__(self, metrics: ServerMetrics) -> None:
        self.apply_seconds = 0.0
        self._metrics = metrics
        self._newest: dict[int, PushTiming] = {}

    def find(self, key: PushKey) -> PushTiming:
        """Return a push's timing; zeros unless it is its worker's newest applied push."""
        newest = self._newest.get(key.worker)
        return (
            newest
            if newest is not None and newest.seq == key.seq
            else PushTiming(key.seq, 0.0, 0.0)
        )

    def record_update(
        self, entry: Apply, staged_at: Sequence[float], began: float, seconds: float
    ) -> None:
        """Record an update.

        staged_at: when each of its pushes was complete (monotonic seconds).
        began: when the update started (monotonic seconds).
        seconds: duration of the update.
        """
        self.apply_seconds += seconds
        self._metrics.applied(seconds, len(staged_at))
        self._metrics.version(entry.version)
        for contribution, since in zip(entry.contributions, staged_at, strict=True):
            self._metrics.pushed("applied", entry.version - 1 - contribution.base)
            self._metrics.waited(began - since)
            self._newest[contribution.key.worker] = PushTiming(
                contribution.key.seq, began - since, seconds
            )

    def drop(self, worker: int) -> None:
        """Forget a worker that has left."""
        self._newest.pop(worker, None)
