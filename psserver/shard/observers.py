"""Observers of a shard: what the engine tells about pushes, updates and workers, for metrics, the
status and warnings.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from pscommon.core.log_entries import Apply, PushKey, Reject
from pscommon.telemetry.logs import get_logger
from psserver.durability.shard_state import ShardState
from psserver.parameters.push_groups import PushGroups
from psserver.parameters.store import count_elements
from psserver.process.metrics import ServerMetrics

MAX_VALUES_COUNT = 3
"""Number of differing values that a warning names."""

log = get_logger(__name__)


class ShardObserver:
    """Base class of observers; an observer overrides what concerns it.

    The engine calls each method while it changes the shard, so it must return at once.
    """

    def on_install(self, state: ShardState) -> None:
        """The shard's whole state was replaced."""

    def on_model(self, state: ShardState) -> None:
        """The shard has another partition of the model."""

    def on_receive(self, nbytes: int) -> None:
        """A push of `nbytes` bytes has been received."""

    def on_repeat(self) -> None:
        """A push was received again after it had been decided."""

    def on_update(
        self, entry: Apply, staged_at: Sequence[float], began: float, seconds: float
    ) -> None:
        """An update was applied.

        staged_at: when each of its pushes was complete, in monotonic seconds.
        began: when the update started, in monotonic seconds.
        seconds: duration of the update.
        """

    def on_reject(self, entry: Reject) -> None:
        """A push was refused."""

    def on_evict(self, worker: int) -> None:
        """A worker has left the job."""


class PushTiming(NamedTuple):
    """Durations of one push.

    seq: the push's number.
    wait_seconds: time staged, until its update started.
    apply_seconds: duration of the update that applied it.
    """

    seq: int
    wait_seconds: float
    apply_seconds: float


class TrafficStatistics(ShardObserver):
    """Counts pushes, updates and bytes, and notes which workers are active.

    received_bytes: bytes of pushes so far.
    sent_bytes: bytes of weights so far.
    apply_seconds: duration of all updates so far.
    duplicate_count: pushes received again after they were decided.
    """

    def __init__(self, metrics: ServerMetrics) -> None:
        self.received_bytes = self.sent_bytes = self.duplicate_count = 0
        self.apply_seconds = 0.0
        self._metrics = metrics
        self._newest: dict[int, PushTiming] = {}  # of each worker's applied pushes
        self._last_active: dict[int, float] = {}

    def find(self, key: PushKey) -> PushTiming:
        """Return a push's timing; zeros unless it is its worker's newest applied push."""
        newest = self._newest.get(key.worker)
        return (
            newest
            if newest is not None and newest.seq == key.seq
            else PushTiming(key.seq, 0.0, 0.0)
        )

    def count_sent(self, nbytes: int) -> None:
        self.sent_bytes += nbytes
        self._metrics.count_bytes(sent=nbytes)

    def note_request(self, worker: int) -> None:
        """Note a request of this worker, with or without all its bytes."""
        self._last_active[worker] = time.monotonic()

    def take_active_workers(self) -> dict[int, float]:
        """Return the workers active since the last call: worker -> seconds since its last frame."""
        active, self._last_active = self._last_active, {}
        now = time.monotonic()
        return {worker: now - at for worker, at in active.copy().items()}

    def on_install(self, state: ShardState) -> None:
        self._metrics.version.set(state.machine.version)

    def on_model(self, state: ShardState) -> None:
        if (store := state.store) is not None:
            self._metrics.set_model_size(count_elements(store.plan, state.shard), store.nbytes)

    def on_receive(self, nbytes: int) -> None:
        self.received_bytes += nbytes
        self._metrics.count_bytes(received=nbytes)

    def on_repeat(self) -> None:
        self.duplicate_count += 1
        self._metrics.count_push("duplicate")

    def on_update(
        self, entry: Apply, staged_at: Sequence[float], began: float, seconds: float
    ) -> None:
        self.apply_seconds += seconds
        self._metrics.record_update(seconds, len(staged_at))
        self._metrics.version.set(entry.version)
        for contribution, since in zip(entry.contributions, staged_at, strict=True):
            self._metrics.count_push("applied", entry.version - 1 - contribution.base)
            self._metrics.barrier_wait.observe(began - since)
            self._newest[contribution.key.worker] = PushTiming(
                contribution.key.seq, began - since, seconds
            )

    def on_reject(self, entry: Reject) -> None:
        self._metrics.count_push("stale" if entry.reason == "STALE" else "rejected")

    def on_evict(self, worker: int) -> None:
        self._newest.pop(worker, None)


class DifferingGroups(ShardObserver):
    """Logs once, on shard 0, that a member has other hyper-parameters than its round uses."""

    def __init__(self) -> None:
        self._state: ShardState | None = None
        self._reported: set[int] = set()

    def on_model(self, state: ShardState) -> None:
        self._state = state if state.shard == 0 else None

    def on_update(
        self, entry: Apply, staged_at: Sequence[float], began: float, seconds: float
    ) -> None:
        if self._state is None or len(entry.contributions) == 1:
            return
        used = self._state.groups_of(entry)
        for key, *_ in entry.contributions:
            own = self._state.staged[key].staging.groups
            # equal texts are one object, usually
            if used is None or own is None or own is used or own.values == used.values:
                continue
            if key.worker not in self._reported:
                self._reported.add(key.worker)
                log.warning(
                    "hyper_parameters_differ",
                    worker=key.worker,
                    own=_differing(own, used),
                    used=_differing(used, own),
                    remedy="call job.resume(scheduler) with each new LR scheduler; values that "
                    "change in another way must change in all workers at the same step",
                )

    def on_evict(self, worker: int) -> None:
        self._reported.discard(worker)


def _differing(groups: PushGroups, others: PushGroups) -> str:
    """Return the values that `others` has not, as "group 0 lr 0.1, group 1 lr 0.01"."""
    found = [
        f"{f'group {index} ' if len(groups.values) > 1 else ''}{key} {value!r}"
        for index, (group, other) in enumerate(zip(groups.values, others.values, strict=True))
        for key, value in sorted(group.items())
        if other[key] != value
    ]
    more = len(found) - MAX_VALUES_COUNT
    return ", ".join(found[:MAX_VALUES_COUNT]) + (f" and {more} more" if more > 0 else "")
