"""Where a script is among its loops: what it is in, may still begin, and has behind it."""

from collections.abc import Callable
from typing import Protocol
from weakref import WeakValueDictionary


class LoopBatches(Protocol):
    """What a worker has of one loop.

    Attributes:
        loop: Number of the loop.
    """

    loop: int

    def forget(self) -> None:
        """All batches that were leased and not used are other workers' now."""

    def give_back(self) -> None:
        """Return to the job all batches that were leased and not used."""


class OpenLoops:
    """The loops that a script is in (`open`) or has made and may still begin: by their numbers,
    the first of these.

    `iter()` of a loader makes a loop, and the first `next()` begins it, perhaps inside a later
    one: `rows = iter(job.batches(a))`, and `next(rows)` in a loop over b. But where two loops
    that are in no other have begun since it was made, the script keeps it for later, and has
    left what lies between.

    count: how many the script has made.
    """

    def __init__(self) -> None:
        self.open: list[LoopBatches] = []
        self.count = 0
        self._made: WeakValueDictionary[int, object] = WeakValueDictionary()
        self._last = -1
        self._passed: set[int] = set()
        self._behind = 0

    @property
    def first(self) -> int:
        return min([*self._made, *(leases.loop for leases in self.open)])

    def make(self, loop: int, iterator: object) -> None:
        """The next one, whose number is `count`. It will not begin any more once the script
        drops its iterator.
        """
        self._made[loop] = iterator
        self.count = loop + 1

    def discard(self, loop: int) -> None:
        """One that was made will not begin."""
        self._made.pop(loop, None)

    def begin(self, leases: LoopBatches) -> None:
        self.discard(leases.loop)
        if not self.open:  # it is in no other
            for loop in [loop for loop in self._made if loop <= self._last]:
                self.discard(loop)
            self._last = leases.loop
        self.open.append(leases)

    def passed(self, loop: int) -> None:
        """This loop has ended: all its batches have counted. What lies in another one may come
        again with that.
        """
        if self.open[0].loop == loop:
            self._passed.add(loop)

    def end(self, leases: LoopBatches, version: int) -> None:
        """The script has left this loop, be it before its end. version: after its last push in
        it; 0: it made none.
        """
        self.open.remove(leases)
        # one that has ended is known by its number
        if not self.open and leases.loop not in self._passed:
            self._behind = max(self._behind, version)

    def come_again(self, has_ended: Callable[[int], bool], version: int) -> bool:
        """Are the servers, by the loops that have ended there and by their version, before
        something that the script has behind it?"""
        return version < self._behind or not all(map(has_ended, self._passed))
