"""The place of a process among those of its worker."""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class GroupPlace(NamedTuple):
    """The place of a process in its group: rank 0, 1, ... of `size` ranks."""

    rank: int = 0
    size: int = 1

    def own(self, rows: Sequence[T]) -> tuple[Sequence[T], int]:
        """Return this rank's part of a batch, and how many of its rows count.

        The parts are equal to within one row. A rank without a row gets those of the last rank,
        which do not count there: it has to compute something.
        """
        start, stop = (len(rows) * rank // self.size for rank in (self.rank, self.rank + 1))
        if start < stop or not rows:
            return rows[start:stop], stop - start
        return rows[len(rows) * (self.size - 1) // self.size :], 0


ALONE = GroupPlace()
"""The place of a process that is a worker by itself."""
