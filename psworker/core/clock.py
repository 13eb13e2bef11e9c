"""Time of a client: its source, and how long the script has made no call."""

from collections.abc import Callable
from dataclasses import dataclass

MAX_COUNTED_SECONDS = 2.0


@dataclass(frozen=True)
class Clock:
    """Time and pauses, in seconds; a simulation supplies its own."""

    now: Callable[[], float]
    sleep: Callable[[float], None]


class CallActivity:
    """Measures the time since the script's last call into this library.

    Only calls of the script count: heartbeats come from another thread and continue while the
    script hangs. A call that waits for other workers is no hang, because a server has a request.
    A process that was stopped as a whole did not hang either, so one interval counts at most
    MAX_COUNTED_SECONDS. Call `beat` with every heartbeat.
    """

    def __init__(self, now: float) -> None:
        self._last = now
        self._calls = 0
        self._seconds = 0.0

    def beat(self, now: float, calls: int, waits: bool) -> float:
        """Return the seconds without a call.

        calls: Number of calls that the script has made.
        waits: A request of the script is in flight.
        """
        passed, self._last = min(now - self._last, MAX_COUNTED_SECONDS), now
        active, self._calls = waits or calls != self._calls, calls
        self._seconds = 0.0 if active else self._seconds + passed
        return self._seconds
