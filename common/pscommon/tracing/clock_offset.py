"""The difference between a process's monotonic clock and that of shard 0.

As in NTP (RFC 5905): shard 0 reads its clock between the sending of a message and the receipt of
its answer. The shortest round trip limits the error best: it is at most half of it.
"""

from collections import deque
from typing import NamedTuple

WINDOW_SECONDS = 30.0
"""Age up to which a round trip counts."""

MAX_DRIFT_RATIO = 500e-6
"""How far one clock may run ahead of another one, as NTP assumes (RFC 5905: PHI and its limits)."""


class ClockOffset(NamedTuple):
    """What to add to a process's monotonic clock to get that of shard 0.

    Attributes:
        seconds: The offset.
        uncertainty_seconds: How far it may be off.
    """

    seconds: float
    uncertainty_seconds: float

    def contradicts(self, other: "ClockOffset", apart: float = WINDOW_SECONDS) -> bool:
        """Return whether both cannot be true, measured `apart` seconds from each other."""
        between = abs(self.seconds - other.seconds)
        uncertain = self.uncertainty_seconds + other.uncertainty_seconds
        return between > uncertain + MAX_DRIFT_RATIO * apart


class _RoundTrip(NamedTuple):
    seconds: float
    ended: float
    offset: ClockOffset


class OffsetEstimate:
    """Finds the offset from round trips. All times are in seconds."""

    def __init__(self) -> None:
        self._trips: deque[_RoundTrip] = deque()

    def add(self, sent: float, received: float, other: float) -> None:
        """Add a round trip.

        Args:
            sent: When the message left, by this process's clock, plus the time that the other
                side took to answer, if it is known.
            received: When the answer came, by this process's clock.
            other: When the answer left, by the clock of shard 0.
        """
        if received < sent:
            return  # the echo of an older connection
        half = (received - sent) / 2
        trip = _RoundTrip(2 * half, received, ClockOffset(other + half - received, half))
        if any(trip.offset.contradicts(each.offset) for each in self._trips):
            self._trips.clear()  # a clock has jumped: its machine was suspended
        self._trips.append(trip)
        while self._trips[0].ended < received - WINDOW_SECONDS:
            self._trips.popleft()

    @property
    def best(self) -> ClockOffset | None:
        """The offset by the shortest round trip of the window; None before the first one."""
        return min(self._trips.copy()).offset if self._trips else None
