"""A lane that loses its connection without a message."""

from typing import Any

from pscommon.core.errors import UnreachableError
from psworker.core.clock import Clock
from psworker.transport.interface import Transport

HOUR = 3600.0


class BreakableLane:
    """A worker's lane that can be disconnected. Each later reading of its clock is an hour after
    the one before, so that timeouts end, also those of requests that begin then.
    """

    def __init__(self, lane: Transport) -> None:
        self._lane = lane
        self._is_disconnected, self._hours = False, 0
        self.clock = Clock(self._now, lane.clock.sleep)

    def die(self) -> None:
        self._is_disconnected = True

    def _now(self) -> float:
        self._hours += self._is_disconnected
        return self._lane.clock.now() + HOUR * self._hours

    def find_primaries(self, job: str, timeout: float) -> bool:
        """Return False when disconnected, because no server can be found."""
        return not self._is_disconnected and self._lane.find_primaries(job, timeout)

    def end_stalled(self) -> None:
        self._lane.end_stalled()

    def __getattr__(self, name: str) -> Any:
        if self._is_disconnected and name not in ("addresses", "close", "direct"):
            raise UnreachableError("the lane is disconnected")
        return getattr(self._lane, name)
