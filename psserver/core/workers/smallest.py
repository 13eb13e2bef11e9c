"""The smallest of a changing collection of numbers."""

import heapq

SPARE_COUNT = 16
"""Removed numbers that the heap of a small collection may have."""


class Smallest:
    """Numbers that are added and removed one at a time, and the smallest of them.

    Each operation costs O(log n) of the number of different numbers, on average.

    Attributes:
        count: How many numbers there are.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.count = 0
        self._heap: list[int] = []  # has each number at least once, and numbers that were removed

    def add(self, number: int) -> None:
        count = self._counts.get(number, 0)
        if not count:
            heapq.heappush(self._heap, number)
            if len(self._heap) > 2 * len(self._counts) + SPARE_COUNT:
                self._heap = sorted({*self._counts, number})
        self._counts[number] = count + 1
        self.count += 1

    def remove(self, number: int) -> None:
        """Remove a number that was added."""
        count = self._counts.pop(number)
        if count > 1:
            self._counts[number] = count - 1
        self.count -= 1

    @property
    def value(self) -> int | None:
        """The smallest number; None without any."""
        while self._heap and self._heap[0] not in self._counts:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None
