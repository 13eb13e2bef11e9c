"""How long a worker's own part of a step takes. Waiting for others, most of a quick one's round,
is not in it.
"""

from collections import deque
from collections.abc import Iterable

LATEST = 5
"""Steps that count: their median takes no notice of a hiccup."""

FEWEST = 3
"""Steps that it takes to say anything."""


def median(values: Iterable[float]) -> float:
    """Of at least one number: the middle one, or what lies between the two middle ones."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return (ordered[half] + ordered[~half]) / 2


class StepTimer:
    """Told by the machine of updates. since: when the step in hand began, None where that is not
    known.

    A step is measured from the decision on the push before it to the moment when all shards hold
    its own.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        self._latest: deque[float] = deque(maxlen=LATEST)

    def begin(self, now: float) -> None:
        """The worker can compute its next step."""
        self.since = now

    def end(self, now: float) -> None:
        """All shards hold its push. What is said again, or without a beginning, is no
        measurement.
        """
        if self.since is not None:
            self._latest.append(now - self.since)
        self.since = None

    def pause(self) -> None:
        """It has nothing to compute: the step in hand says nothing."""
        self.since = None

    def forgive(self, seconds: float) -> None:
        """This process itself was stopped for so long."""
        self.since = None if self.since is None else self.since + seconds

    @property
    def seconds(self) -> float | None:
        """Of a step; None before there are enough of them."""
        return median(self._latest) if len(self._latest) >= FEWEST else None
