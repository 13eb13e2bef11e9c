"""Goodput: which part of the computed samples counted, and of the time went into updates."""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from pscommon.core.log_entries import Apply, PushKey, Reject, Staged
from psserver.durability.shard_state import ShardState
from psserver.shard.observers import ShardObserver

INTERVAL_COUNT = 1000
"""Newest intervals between updates that count for their median."""
HISTORY_COUNT = 100_000
"""Newest updates that a rollback can take back exactly, and that wait for the next look."""


class Goodput(ShardObserver):
    """The goodput of a job since this server process began. Only shard 0 counts.

    Samples count as wasted if their push was stale or rejected, if its worker left before a
    decision, or if a rollback lost its update. A gradient that never reached this shard is not
    known.

    Time between two updates beyond the median interval of the newest updates is lost.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._counted = self._wasted = 0
        self._updates = deque[tuple[int, int]](maxlen=HISTORY_COUNT)  # version and its samples
        self._new_ends = deque[float](maxlen=HISTORY_COUNT)
        self._intervals = deque[float](maxlen=INTERVAL_COUNT)
        self._first_end = self._last_end = 0.0
        self._lost_seconds = 0.0
        self._lock = threading.Lock()  # several threads look at the time
        self._state: ShardState | None = None

    def shares(self) -> dict[str, float | None]:
        """Return both numbers by name: samples and seconds."""
        return {"samples": self.samples, "seconds": self.seconds}

    @property
    def samples(self) -> float | None:
        """Samples that counted, per computed sample; None before the first push."""
        computed = self._counted + self._wasted
        return self._counted / computed if computed else None

    @property
    def seconds(self) -> float | None:
        """Return the share of the time from the first to the last update that was not lost.

        None before the second update.
        """
        with self._lock:
            return self._seconds()

    def _seconds(self) -> float | None:
        new = []
        if len(self._new_ends) == HISTORY_COUNT:  # ends before them are missing
            self._last_end = 0.0
        while self._new_ends:
            end = self._new_ends.popleft()
            if self._last_end:
                new.append(end - self._last_end)
            self._first_end, self._last_end = self._first_end or end, end
        self._intervals.extend(new)
        if self._last_end <= self._first_end:
            return None
        usual = statistics.median(self._intervals)
        self._lost_seconds += sum(max(0.0, interval - usual) for interval in new)
        return 1.0 - self._lost_seconds / (self._last_end - self._first_end)

    def on_install(self, state: ShardState) -> None:
        self._state = state if state.shard == 0 else None
        while self._updates and self._updates[-1][0] > state.machine.version:
            _, samples = self._updates.pop()
            self._counted -= samples
            self._wasted += samples

    def on_update(
        self, entry: Apply, staged_at: Sequence[float], began: float, seconds: float
    ) -> None:
        if self._state is None:
            return
        samples = sum(contribution.samples for contribution in entry.contributions)
        self._counted += samples
        self._updates.append((entry.version, samples))
        self._new_ends.append(self._now())

    def on_reject(self, entry: Reject) -> None:
        staged = self._staged().get(entry.key)
        if staged is not None and entry.key.seq:  # 0: initial weights
            self._wasted += staged.samples

    def on_evict(self, worker: int) -> None:
        self._wasted += sum(
            push.samples for key, push in self._staged().items() if key.worker == worker and key.seq
        )

    def _staged(self) -> Mapping[PushKey, Staged]:
        """Return the pushes that are not decided: the engine calls observers first."""
        return self._state.machine.staged if self._state is not None else {}
