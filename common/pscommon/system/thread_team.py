"""Threads for one pass over a large buffer, since one core cannot use the full memory bandwidth.

The caller splits the work at multiples of 64 bytes, like the flat buffer, so that results do not
depend on the number of threads. The work has to release the GIL, as numpy and torch do.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

PART_BYTES = 2 << 20
"""Minimum size of a part; handing over smaller parts costs more than it saves."""

PARTS_PER_THREAD = 4
"""More than one, because cores differ in speed: one may be asleep or busy."""

T = TypeVar("T")
R = TypeVar("R")


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ThreadTeam:
    """Team of the calling thread and `threads` - 1 others, which start at their first use.

    name: Beginning of the names of these threads.
    """

    def __init__(self, threads: int, name: str = "team") -> None:
        self._threads = threads
        self._others = (
            ThreadPoolExecutor(threads - 1, thread_name_prefix=name) if threads > 1 else None
        )

    def parts(self, nbytes: int) -> int:
        """Return the number of parts for a pass over `nbytes` bytes."""
        if self._threads <= 1:
            return 1
        return max(1, min(self._threads * PARTS_PER_THREAD, nbytes // PART_BYTES))

    def map(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Return the results of `work` for all items; threads take items one after another.

        Waits for all items, then raises the exception of one that failed. Thread-safe, but
        `work` must not call it.
        """
        if self._others is None or len(items) < 2:
            return [work(item) for item in items]
        left, results = iter(range(len(items))), dict[int, R]()

        def take() -> None:
            for index in left:  # advancing an iterator is atomic under the GIL
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
