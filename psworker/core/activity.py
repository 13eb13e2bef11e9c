"""How long a script has made no call into this library. A machine: it is told the time.

Only the script's own calls count: heartbeats come from another thread, and go on while the
script hangs. A wait for others inside a call is no hang: meanwhile a server has a request. Time
for which the whole process was stopped is not the script's, so a heartbeat that comes late
counts as one.
"""

LONGEST_BEAT_SECONDS = 2.0


class CallActivity:
    """Tell it every heartbeat."""

    def __init__(self, now: float) -> None:
        self._last = now
        self._calls = 0
        self._seconds = 0.0

    def beat(self, now: float, calls: int, waits: bool) -> float:
        """Return the seconds without a call.

        calls: how many the script has made so far. waits: a server has a request of it.
        """
        passed, self._last = min(now - self._last, LONGEST_BEAT_SECONDS), now
        active, self._calls = waits or calls != self._calls, calls
        self._seconds = 0.0 if active else self._seconds + passed
        return self._seconds
