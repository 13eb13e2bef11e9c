"""The memory that a server may use."""

from pathlib import Path

import pytest

from pscommon.system.process_limits import usable_memory


def machine() -> int:
    (line,) = [
        line
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal")
    ]
    return int(line.split()[1]) << 10


@pytest.fixture
def limit(tmp_path: Path) -> Path:
    return tmp_path / "memory.max"


def test_without_a_container_the_limit_is_the_machines_memory(limit: Path) -> None:
    assert usable_memory(()) == usable_memory((limit,)) == machine()


@pytest.mark.parametrize("text", ["1073741824", "1073741824\n", " 1073741824 "])
def test_a_container_may_have_less(limit: Path, text: str) -> None:
    limit.write_text(text)

    assert usable_memory((limit,)) == 1 << 30


@pytest.mark.parametrize("text", ["max\n", "9223372036854771712", "", "-1", "many"])
def test_a_value_that_is_no_limit_is_ignored(limit: Path, text: str) -> None:
    limit.write_text(text)

    assert usable_memory((limit,)) == machine()


def test_the_smallest_limit_applies(tmp_path: Path) -> None:
    paths = tuple(tmp_path / name for name in ("a", "b", "c"))
    for path, text in zip(paths, ("3000", "1000", "2000"), strict=True):
        path.write_text(text)

    assert usable_memory((tmp_path, *paths)) == 1000


def test_this_process_has_a_limit() -> None:
    assert 1 << 28 <= usable_memory() <= machine()
