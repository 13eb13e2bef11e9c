"""Two process tests run at a time. A test that measures time runs without another process test
beside it.
"""

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SLOTS = 2


class ProcessSlots:
    """Locks that all processes of one run of the test suite share, one byte of a file for each
    slot.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b")

    @contextmanager
    def hold(self, slots: Sequence[int]) -> Iterator[None]:
        """Waits for each slot, in order. The order is the same everywhere: no two processes wait
        for each other.
        """
        for slot in slots:
            fcntl.lockf(self._file, fcntl.LOCK_EX, 1, slot)
        try:
            yield
        finally:
            for slot in slots:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, slot)

    def close(self) -> None:
        self._file.close()


def slots_of(worker: str, measures_time: bool) -> Sequence[int]:
    """worker: the name that pytest-xdist gives to a process: gw0, gw1, ..."""
    return range(SLOTS) if measures_time else [int(worker.removeprefix("gw")) % SLOTS]
