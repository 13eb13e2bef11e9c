"""A short job in which any disk operation fails, once or until a restart, or a server is killed
there.

After a failure training continues, one ERROR per log and the metrics report it, and every snapshot
loads. The servers repair their logs once the disk works: a restart loses no acknowledged update.
After a kill, a server with a log recovers without an effect on other processes. Without logs all
shards roll back to the newest snapshot together.
"""

import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from tests.sim.every_operation import SERIES, UNLIMITED, partial_writes, run_series

SHARED_MEMORY = Path("/dev/shm")
SHARES, SHORT_SHARES = 40, 16
"""Each test runs every 40th, or every 16th, operation, so that it takes seconds."""
MIN_OPERATIONS = {
    "any errno, log": 300,
    "ENOSPC, log, lasting": 150,
    "kill, log": 240,
    "any errno, snapshot": 55,
    "EROFS, snapshot, lasting": 25,
    "kill of all, snapshot": 50,
}
"""Minimum number of operations of each job."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder in shared memory, where a sync takes no time, if the system has one."""
    with tempfile.TemporaryDirectory(
        prefix="ps-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    ) as path:
        yield Path(path)


@pytest.mark.every(SHARES)
@pytest.mark.parametrize(("name", "share"), list(product(MIN_OPERATIONS, range(SHARES))))
def test_no_acknowledged_update_is_lost(folder: Path, name: str, share: int) -> None:
    done = run_series(folder, SERIES[name], range(1 + share, UNLIMITED, SHARES))

    assert done >= MIN_OPERATIONS[name] // SHARES


@pytest.mark.every(SHORT_SHARES)
@pytest.mark.parametrize("share", range(SHORT_SHARES))
@pytest.mark.parametrize(("durability", "min_operations"), [("log", 80), ("snapshot", 8)])
def test_no_acknowledged_update_is_lost_by_a_partial_write(
    folder: Path, durability: str, min_operations: int, share: int
) -> None:
    numbers = partial_writes(folder / "intact", durability)

    assert len(numbers) >= min_operations
    sample = numbers[share::SHORT_SHARES]
    assert run_series(folder, SERIES[f"short, {durability}"], sample) == len(sample)
