"""Pushes of workers that may be too far ahead of the slowest one (ssp)."""

import heapq
from collections.abc import Callable
from typing import NamedTuple


class WaitingPush(NamedTuple):
    """The oldest ready push of a worker.

    Attributes:
        clock: Clock of the worker.
        arrival: Place of the push in the order of arrival.
        worker: Number of the worker.
    """

    clock: int
    arrival: int
    worker: int


class WaitingPushes:
    """Finds the push that arrived first, of the workers whose clock is not above a limit.

    A push moves once from the heap by clock to the heap by arrival. A push that is decided, or
    whose worker has another clock, is not removed at once: `first` skips it.
    """

    def __init__(self) -> None:
        self._ahead: list[WaitingPush] = []
        self._due: list[tuple[int, WaitingPush]] = []

    def add(self, push: WaitingPush) -> None:
        """Add a push. Repeating it is harmless."""
        heapq.heappush(self._ahead, push)

    def first(self, limit: int, is_valid: Callable[[WaitingPush], bool]) -> WaitingPush | None:
        """Return the first push, which stays.

        Args:
            limit: Largest clock of its worker.
            is_valid: Returns whether a push still waits.
        """
        while self._ahead and self._ahead[0].clock <= limit:
            push = heapq.heappop(self._ahead)
            heapq.heappush(self._due, (push.arrival, push))
        while self._due:
            push = self._due[0][1]
            if is_valid(push) and push.clock <= limit:
                return push
            heapq.heappop(self._due)
            if is_valid(push):  # the smallest clock has decreased
                heapq.heappush(self._ahead, push)
        return None
