"""The loops of a script: open loops, loops that it may still begin, and loops that it has left."""

from collections.abc import Callable
from typing import Protocol
from weakref import WeakValueDictionary


class LoopBatches(Protocol):
    """The batches of one loop that a worker has leased.

    Attributes:
        loop: Number of the loop.
    """

    loop: int

    def forget(self) -> None:
        """Drop all leased and unused batches: the job has given them to other workers."""

    def give_back(self) -> None:
        """Return all leased and unused batches to the job."""


class OpenLoops:
    """The loops that a script is in or may still begin, by their numbers.

    `iter()` of a loader makes a loop, and the first `next()` begins it, perhaps inside a later
    loop: `rows = iter(job.batches(a))`, and `next(rows)` in a loop over b. Once two outermost
    loops have begun after it was made, the script keeps the loop for later use, and `first` no
    longer counts it.

    Attributes:
        open: The loops that the script is in, the outermost first.
        count: Number of loops that the script has made.
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
        """Smallest number of a loop that the script is in or may still begin."""
        return min([*self._made, *(leases.loop for leases in self.open)], default=self.count)

    def make(self, loop: int, iterator: object) -> None:
        """Add a loop, whose number is `count`. It cannot begin once its iterator is deleted."""
        self._made[loop] = iterator
        self.count = loop + 1

    def discard(self, loop: int) -> None:
        """Remove a loop that was made and will not begin."""
        self._made.pop(loop, None)

    def begin(self, leases: LoopBatches) -> None:
        """Open a loop, inside the loops that are open already."""
        self.discard(leases.loop)
        if not self.open:
            for loop in [loop for loop in self._made if loop <= self._last]:
                self.discard(loop)
            self._last = leases.loop
        self.open.append(leases)

    def passed(self, loop: int) -> None:
        """Record that all batches of this loop have counted.

        A loop inside another one is not recorded: it may run again together with the outer loop.
        """
        if self.open[0].loop == loop:
            self._passed.add(loop)

    def end(self, leases: LoopBatches, version: int) -> None:
        """Close a loop that the script has left, at its end or before.

        version: Version after the last push in the loop; 0: there was no push.
        """
        self.open.remove(leases)
        # A loop of `_passed` needs no version: `come_again` checks its number.
        if not self.open and leases.loop not in self._passed:
            self._behind = max(self._behind, version)

    def come_again(self, has_ended: Callable[[int], bool], version: int) -> bool:
        """Return whether the servers have rolled back work of a loop that the script has left.

        has_ended: Returns whether a loop has ended on the servers.
        version: The servers' version.
        """
        return version < self._behind or not all(map(has_ended, self._passed))
