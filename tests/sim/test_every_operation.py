"""A disk that fails at any operation, once or from then on, and servers that die at any operation.

After each failure training continues, one ERROR for each log and the metrics report it, every
snapshot loads, and the logs are complete again once the disk works: after a restart no
acknowledged update is missing. After each death other processes notice nothing with logs;
without logs all shards return to the newest snapshot together.
"""

import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from tests.sim.every_operation import FOR_GOOD, WALKS, walk, writes

SHARED_MEMORY = Path("/dev/shm")
SHARES, SHORT_SHARES = 20, 8
"""Each test takes every 20th operation, so that it takes seconds."""
FEWEST = {
    "any errno, log": 300,
    "ENOSPC, log, for long": 150,
    "a death, log": 240,
    "any errno, snapshot": 55,
    "EROFS, snapshot, for long": 25,
    "a death of all, snapshot": 50,
}
"""Operations that such a job has at least."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where syncing takes no time, if there is such a place."""
    with tempfile.TemporaryDirectory(
        prefix="ps-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    ) as made:
        yield Path(made)


@pytest.mark.every(SHARES)
@pytest.mark.parametrize(("name", "share"), list(product(FEWEST, range(SHARES))))
def test_nothing_is_lost(folder: Path, name: str, share: int) -> None:
    done = walk(folder, WALKS[name], range(1 + share, FOR_GOOD, SHARES))

    assert done >= FEWEST[name] // SHARES


@pytest.mark.every(SHORT_SHARES)
@pytest.mark.parametrize("share", range(SHORT_SHARES))
@pytest.mark.parametrize(("durability", "fewest"), [("log", 80), ("snapshot", 8)])
def test_nothing_is_lost_by_a_write_cut_short(
    folder: Path, durability: str, fewest: int, share: int
) -> None:
    numbers = writes(folder / "sound", durability)

    assert len(numbers) >= fewest
    mine = numbers[share::SHORT_SHARES]
    assert walk(folder, WALKS[f"short, {durability}"], mine) == len(mine)
