"""Pauses of this machine: promised seconds count only while it runs."""

import threading
import time

POLL_SECONDS = 0.02
PAUSE_SECONDS = 0.5
"""Seconds between two observations from which on the machine was paused."""


class Standstills:
    """Pauses between observations that should be POLL_SECONDS apart, as time.monotonic."""

    def __init__(self, now: float) -> None:
        self._last = now
        self._found: list[tuple[float, float]] = []

    def observe(self, now: float) -> None:
        if now - self._last > PAUSE_SECONDS:
            self._found.append((self._last, now))
        self._last = now

    def running(self, since: float, to: float) -> float:
        """Return the seconds between two times without pauses."""
        return (
            to
            - since
            - sum(max(0.0, min(to, end) - max(since, start)) for start, end in self._found)
        )


_standstills = Standstills(time.monotonic())
_lock = threading.Lock()


def machine_seconds(since: float, to: float | None = None) -> float:
    """Return the seconds from `since` to `to` (default: now) in which this machine ran."""
    _observe()
    return _standstills.running(since, time.monotonic() if to is None else to)


def _observe() -> None:
    with _lock:
        _standstills.observe(time.monotonic())


def _observe_forever() -> None:
    pause = threading.Event()
    while True:
        pause.wait(POLL_SECONDS)
        _observe()


threading.Thread(target=_observe_forever, name="standstill", daemon=True).start()
