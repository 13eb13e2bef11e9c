"""Pool of batch numbers from 0 on; each is free, taken or committed."""

import heapq
from collections.abc import Mapping
from typing import Any


class BatchPool:
    """Gives out the smallest returned number, or else the next fresh one.

    total: count of numbers in the pool; None: not known yet.
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
        """Return the number that `take` would return; None if none is free."""
        if self._returned:
            return self._returned[0]
        # after a restore, committed numbers lie ahead of the cursor
        while self._cursor < self._below or self._cursor in self._above:
            self._cursor += 1
        return self._cursor if self.total is None or self._cursor < self.total else None

    def take(self) -> int:
        """Take the number that `peek` returns."""
        number = self.peek()
        assert number is not None, "peek first"
        if self._returned:
            return heapq.heappop(self._returned)
        self._cursor += 1
        return number

    def end(self, total: int) -> None:
        """Limit the pool to `total` numbers."""
        self.total = total
        self._returned = [number for number in self._returned if number < total]
        heapq.heapify(self._returned)

    def put_back(self, number: int) -> None:
        """Free a taken number."""
        heapq.heappush(self._returned, number)

    def commit(self, number: int) -> None:
        """Commit a number."""
        self._above.add(number)
        while self._below in self._above:
            self._above.remove(self._below)
            self._below += 1

    def state(self) -> dict[str, Any]:
        """Return the state, JSON-ready; `recovered` is the inverse."""
        above, returned = sorted(self._above), sorted(self._returned)
        return {"below": self._below, "above": above, "cursor": self._cursor, "returned": returned}

    @staticmethod
    def restored(total: int | None, state: Mapping[str, Any]) -> "BatchPool":
        """Return a pool with the committed numbers of the state; all others are free."""
        pool = BatchPool(total)
        pool._below = pool._cursor = state["below"]
        pool._above = set(state["above"])
        return pool

    @staticmethod
    def recovered(total: int | None, state: Mapping[str, Any]) -> "BatchPool":
        """Return a pool with the exact state."""
        pool = BatchPool.restored(total, state)
        pool._cursor, pool._returned = state["cursor"], list(state["returned"])
        return pool
