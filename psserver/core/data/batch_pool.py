"""Numbers from 0 on: each is free, out, or committed."""

import heapq
from collections.abc import Mapping
from typing import Any


class BatchPool:
    """Gives out the smallest number that came back, else the next fresh one.

    total: how many there are; None: not known yet.
    """

    def __init__(self, total: int | None = None) -> None:
        self.total = total
        self._cursor = 0
        self._returned: list[int] = []
        self._below = 0
        self._above: set[int] = set()

    @property
    def committed(self) -> int:
        return self._below + len(self._above)

    @property
    def first_open(self) -> int:
        """The smallest number that is not committed."""
        return self._below

    def peek(self) -> int | None:
        """What `take` would give; None: nothing is free."""
        if self._returned:
            return self._returned[0]
        while (
            self._cursor < self._below or self._cursor in self._above
        ):  # after a restore, what counts lies ahead
            self._cursor += 1
        return self._cursor if self.total is None or self._cursor < self.total else None

    def take(self) -> int:
        """The number that `peek` showed is out from now on."""
        number = self.peek()
        assert number is not None, "peek first"
        if self._returned:
            return heapq.heappop(self._returned)
        self._cursor += 1
        return number

    def end(self, total: int) -> None:
        """There are only so many."""
        self.total = total
        self._returned = [number for number in self._returned if number < total]
        heapq.heapify(self._returned)

    def put_back(self, number: int) -> None:
        """It is free again."""
        heapq.heappush(self._returned, number)

    def commit(self, number: int) -> None:
        """It has counted."""
        self._above.add(number)
        while self._below in self._above:
            self._above.remove(self._below)
            self._below += 1

    def state(self) -> dict[str, Any]:
        """JSON-ready; `recovered` is the way back."""
        above, returned = sorted(self._above), sorted(self._returned)
        return {"below": self._below, "above": above, "cursor": self._cursor, "returned": returned}

    @staticmethod
    def restored(total: int | None, state: Mapping[str, Any]) -> "BatchPool":
        """What has counted; all else is free."""
        pool = BatchPool(total)
        pool._below = pool._cursor = state["below"]
        pool._above = set(state["above"])
        return pool

    @staticmethod
    def recovered(total: int | None, state: Mapping[str, Any]) -> "BatchPool":
        """All of it."""
        pool = BatchPool.restored(total, state)
        pool._cursor, pool._returned = state["cursor"], list(state["returned"])
        return pool
