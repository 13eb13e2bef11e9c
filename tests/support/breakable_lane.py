"""A lane that loses its connection without a message."""

from typing import Any

from pscommon.core.errors import UnreachableError
from psworker.core.clock import Clock
from psworker.transport.interface import Transport

HOUR = 3600.0


class BreakableLane:
    """A worker's lane that can be disconnected; its clock then jumps by an hour, so timeouts
    end.
    """

    def __init__(self, lane: Transport) -> None:
        self._lane = lane
        self._is_disconnected = False
        self.clock = Clock(
            lambda: lane.clock.now() + HOUR * self._is_disconnected, lane.clock.sleep
        )

    def die(self) -> None:
        self._is_disconnected = True

    def find_primaries(self, job: str, timeout: float) -> bool:
        """Return False when disconnected, because no server can be found."""
        return not self._is_disconnected and self._lane.find_primaries(job, timeout)

    def end_stalled(self) -> None:
        self._lane.end_stalled()

    def __getattr__(self, name: str) -> Any:
        if self._is_disconnected and name not in ("addresses", "close", "direct"):
            raise UnreachableError("the lane is disconnected")
        return getattr(self._lane, name)
