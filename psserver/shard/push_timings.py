"""Where the time of a push went on a shard."""

from collections.abc import Sequence
from typing import NamedTuple

from pscommon.core.log_entries import Apply, PushKey
from psserver.process.metrics import ServerMetrics


class PushTiming(NamedTuple):
    """Seconds that a push waited, staged, for the decision, and that the update took that
    counted it.
    """

    seq: int
    wait: float
    apply: float


class PushTimings:
    """Of each worker's newest push that counted. apply_seconds: of all updates."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self.apply_seconds = 0.0
        self._metrics = metrics
        self._newest: dict[int, PushTiming] = {}

    def of(self, key: PushKey) -> PushTiming:
        """A push's, as long as it is its worker's newest that counted."""
        known = self._newest.get(key.worker)
        return (
            known if known is not None and known.seq == key.seq else PushTiming(key.seq, 0.0, 0.0)
        )

    def applied(
        self, entry: Apply, staged_at: Sequence[float], began: float, seconds: float
    ) -> None:
        """An update has counted these pushes; staged_at: when each was complete here."""
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
        """The worker is out."""
        self._newest.pop(worker, None)
