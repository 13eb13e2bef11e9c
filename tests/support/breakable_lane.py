"""A worker that dies without a word."""

from typing import Any

from pscommon.core.errors import UnreachableError
from psworker.core.clock import Clock
from psworker.transport.interface import Transport

HOUR = 3600.0


class BreakableLane:
    """A worker's line that can go dead: nothing gets through any more, not even a goodbye; and
    an hour passes then, so that nobody waits for that."""

    def __init__(self, lane: Transport) -> None:
        self._lane = lane
        self._dead = False
        self.clock = Clock(lambda: lane.clock.now() + HOUR * self._dead, lane.clock.sleep)

    def die(self) -> None:
        self._dead = True

    def find_primaries(self, job: str, timeout: float) -> bool:
        """Never fails: over a dead line nobody new is found."""
        return not self._dead and self._lane.find_primaries(job, timeout)

    def end_stalled(self) -> None:
        self._lane.end_stalled()

    def __getattr__(self, name: str) -> Any:
        if self._dead and name not in ("addresses", "close", "direct"):
            raise UnreachableError("the line is dead")
        return getattr(self._lane, name)
