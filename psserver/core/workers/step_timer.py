"""How long a worker's own part of a step takes, without waiting for other workers."""

from collections import deque
from collections.abc import Iterable

MAX_STEPS = 5
"""Newest steps that count; their median ignores single slow steps."""

MIN_STEPS = 3
"""Steps that a median needs."""


def median(values: Iterable[float]) -> float:
    """Return the median of at least one number."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return (ordered[half] + ordered[~half]) / 2


class StepTimer:
    """Measures a step from the decision on the push before it until all shards hold its push.

    Attributes:
        started_at: When the current step began; None: not known.
    """

    def __init__(self) -> None:
        self.started_at: float | None = None
        self._latest: deque[float] = deque(maxlen=MAX_STEPS)

    def begin(self, now: float) -> None:
        """Start a step: the worker can compute."""
        self.started_at = now

    def end(self, now: float) -> None:
        """End a step: all shards hold its push. Without a start nothing is measured."""
        if self.started_at is not None:
            self._latest.append(now - self.started_at)
        self.started_at = None

    def discard(self) -> None:
        """Drop the current step: the worker has nothing to compute."""
        self.started_at = None

    def add_pause(self, seconds: float) -> None:
        """Leave out a time for which this process itself was stopped."""
        if self.started_at is not None:
            self.started_at += seconds

    @property
    def median_seconds(self) -> float | None:
        """Median time of a step; None before MIN_STEPS steps."""
        return median(self._latest) if len(self._latest) >= MIN_STEPS else None
