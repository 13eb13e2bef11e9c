"""Two process tests run at a time; a test that measures time runs without other process tests."""

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SLOTS = 2


class ProcessSlots:
    """Locks that all processes of a test run share: one byte of a file per slot."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b")

    @contextmanager
    def hold(self, slots: Sequence[int]) -> Iterator[None]:
        """Acquire the slots in order. The order is fixed, so no two processes wait for each
        other.
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
    """Return the slots of a test. worker: name from pytest-xdist: gw0, gw1, ..."""
    return range(SLOTS) if measures_time else [int(worker.removeprefix("gw")) % SLOTS]
