"""When this machine stood still. What is promised within so many seconds is promised for those
in which it runs.
"""

import threading
import time

LOOK = 0.02
LONGEST = 0.5
"""Seconds between two looks from which on the machine has stood still: it ran other things, or
nothing.
"""


class Standstills:
    """What lay between looks that should have been LOOK apart. Times: as time.monotonic, of any
    process here.
    """

    def __init__(self, now: float) -> None:
        self._last = now
        self._found: list[tuple[float, float]] = []

    def look(self, now: float) -> None:
        if now - self._last > LONGEST:
            self._found.append((self._last, now))
        self._last = now

    def running(self, since: float, to: float) -> float:
        """Seconds between the two without standstills."""
        return (
            to
            - since
            - sum(max(0.0, min(to, end) - max(since, start)) for start, end in self._found)
        )


_standstills = Standstills(time.monotonic())
_looking = threading.Lock()


def machine_seconds(since: float, to: float | None = None) -> float:
    """Seconds from then to then (None: now) in which this machine ran."""
    _look()
    return _standstills.running(since, time.monotonic() if to is None else to)


def _look() -> None:
    with _looking:
        _standstills.look(time.monotonic())


def _look_forever() -> None:
    pause = threading.Event()
    while True:
        pause.wait(LOOK)
        _look()


threading.Thread(target=_look_forever, name="standstill", daemon=True).start()
