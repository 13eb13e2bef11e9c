"""Several threads for one pass over much memory: one core alone does not use all of a machine's
bandwidth.

The work is cut by whoever hands it out, on multiples of 64 bytes as the tape is cut into shards,
so the bits do not depend on the number of threads. What it does has to let go of the GIL, as
numpy and torch do.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

PART_BYTES = 2 << 20
"""Less than this is not worth handing over to another thread."""

PARTS_A_THREAD = 4
"""More than one, because cores are not equally fast: one may have to wake up, or be another's
for a while.
"""

T = TypeVar("T")
R = TypeVar("R")


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ThreadTeam:
    """The calling thread and `threads` - 1 others, which start when they are first needed and
    end with the team.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._others = (
            ThreadPoolExecutor(threads - 1, thread_name_prefix="team") if threads > 1 else None
        )

    def parts(self, nbytes: int) -> int:
        """Into how many parts a pass over so many bytes is best cut."""
        return (
            max(1, min(self._threads * PARTS_A_THREAD, nbytes // PART_BYTES))
            if self._threads > 1
            else 1
        )

    def map(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """What `work` makes of each item; every thread takes the next one when it is done with
        one.

        Ends when all have ended, and raises what one of them did. Any number of threads may call
        it; an item's work must not.
        """
        if self._others is None or len(items) < 2:
            return [work(item) for item in items]
        left, results = iter(range(len(items))), dict[int, R]()

        def take() -> None:
            for index in left:  # advancing it is one step, which threads cannot share
                results[index] = work(items[index])

        futures = [self._others.submit(take) for _ in range(min(self._threads, len(items)) - 1)]
        try:
            take()
        finally:
            for future in futures:
                future.exception()
        for future in futures:
            future.result()
        return [results[index] for index in range(len(items))]


ALONE = ThreadTeam(1)
