"""Where a script is among its loops: what it is in, may still begin, and has behind it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from psworker.batches import Leases


class Loops:
    """The loops that a script is in (`open`) or has made and may still begin: by their numbers, the first of these.

    `iter()` of a loader makes a loop, and the first `next()` begins it, perhaps inside a later one:
    `rows = iter(job.batches(a))`, and `next(rows)` in a loop over b. But where two loops that are in no other have
    begun since it was made, the script keeps it for later, and has left what lies between.

    count: how many the script has made.
    """

    def __init__(self) -> None:
        self.open: list[Leases] = []
        self.count = 0
        self._made: set[int] = set()
        self._last = -1
        self._passed: set[int] = set()
        self._behind = 0

    @property
    def first(self) -> int:
        return min([*self._made, *(leases.loop for leases in self.open)])

    def make(self, loop: int) -> None:
        """The next one, whose number is `count`."""
        self._made.add(loop)
        self.count = loop + 1

    def begin(self, leases: "Leases") -> None:
        self._made.discard(leases.loop)
        if not self.open:  # it is in no other
            self._made = {loop for loop in self._made if loop > self._last}
            self._last = leases.loop
        self.open.append(leases)

    def passed(self, loop: int) -> None:
        """This loop has ended: all its batches have counted."""
        self._passed.add(loop)

    def end(self, leases: "Leases", version: int) -> None:
        """The script has left this loop, be it before its end. version: after its last push in it; 0: it made none."""
        self.open.remove(leases)
        # one that has ended is known by its number; what lies in another one may come again with that
        if not self.open and leases.loop not in self._passed:
            self._behind = max(self._behind, version)

    def come_again(self, open_loop: int, version: int) -> bool:
        """Are the servers, by their first open loop and version, before something that the script has behind it?"""
        return open_loop in self._passed or version < self._behind
