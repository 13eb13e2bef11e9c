"""How fast a script takes batches."""

from collections.abc import Callable

NEWEST_INTERVAL_RATIO = 0.25
"""Weight of the newest interval in the mean."""


class ScriptPace:
    """The mean time between two batches that a script takes.

    Args:
        now: Returns the time in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._taken_at: float | None = None
        self._interval: float | None = None

    def take(self) -> None:
        """Record that the script takes a batch."""
        now = self._now()
        if self._taken_at is not None:
            newest = now - self._taken_at
            before = newest if self._interval is None else self._interval
            self._interval = before + NEWEST_INTERVAL_RATIO * (newest - before)
        self._taken_at = now

    def pause(self) -> None:
        """Leave out the time until the next batch: the script waits for others."""
        self._taken_at = None

    def count_in(self, seconds: float, limit: int) -> int:
        """Return how many batches the script takes in this time: 1 to `limit`, 1 if unknown."""
        if self._interval is None:
            return 1
        if limit * self._interval <= seconds:  # also if a coarse clock has measured 0
            return limit
        return max(1, int(seconds / self._interval))
