"""Statistics of a shard's pushes and updates, for metrics, the status and workers."""

from collections.abc import Sequence
from typing import NamedTuple

from pscommon.core.log_entries import Apply, PushKey, Reject
from psserver.durability.shard_state import ShardState
from psserver.parameters.store import count_elements
from psserver.process.metrics import ServerMetrics
from psserver.shard.observers import ShardObserver


class PushTiming(NamedTuple):
    """Durations of one push.

    seq: the push's number.
    wait_seconds: time staged, until its update started.
    apply_seconds: duration of the update that applied it.
    """

    seq: int
    wait_seconds: float
    apply_seconds: float


class PushStatistics(ShardObserver):
    """Counts pushes and updates, and keeps the timing of each worker's newest applied push.

    apply_seconds: duration of all updates so far.
    duplicate_count: pushes received again after they were decided.
    """

    def __init__(self, metrics: ServerMetrics) -> None:
        self.apply_seconds = 0.0
        self.duplicate_count = 0
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

    def on_install(self, state: ShardState) -> None:
        self._metrics.set_version(state.machine.version)

    def on_model(self, state: ShardState) -> None:
        if (store := state.store) is not None:
            self._metrics.set_model_size(count_elements(store.plan, state.shard), store.nbytes)

    def on_repeat(self) -> None:
        self.duplicate_count += 1
        self._metrics.count_push("duplicate")

    def on_update(
        self, entry: Apply, staged_at: Sequence[float], began: float, seconds: float
    ) -> None:
        self.apply_seconds += seconds
        self._metrics.record_update(seconds, len(staged_at))
        self._metrics.set_version(entry.version)
        for contribution, since in zip(entry.contributions, staged_at, strict=True):
            self._metrics.count_push("applied", entry.version - 1 - contribution.base)
            self._metrics.record_barrier_wait(began - since)
            self._newest[contribution.key.worker] = PushTiming(
                contribution.key.seq, began - since, seconds
            )

    def on_reject(self, entry: Reject) -> None:
        self._metrics.count_push("stale" if entry.reason == "STALE" else "rejected")

    def on_evict(self, worker: int) -> None:
        self._newest.pop(worker, None)
