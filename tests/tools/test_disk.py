"""A small disk is full, free and read-only when it says so, and gone afterwards."""

import errno
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.small_disk import SmallDisk, missing

SIZE = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    if reason := missing(tmp_path):
        pytest.skip(reason)
    with SmallDisk(tmp_path / "disk", SIZE) as disk:
        yield disk


def refusal(path: Path, nbytes: int = 1) -> int | None:
    """errno of writing a file."""
    try:
        path.write_bytes(bytes(nbytes))
    except OSError as error:
        return error.errno
    return None


def test_a_full_disk_refuses_a_byte_and_takes_it_once_freed(disk: SmallDisk) -> None:
    disk.fill(leave=100 << 10)
    assert refusal(disk.path / "fits", 90 << 10) is None
    assert refusal(disk.path / "does not", 20 << 10) == errno.ENOSPC
    (disk.path / "fits").unlink()
    (disk.path / "does not").unlink()
    disk.fill()
    assert refusal(disk.path / "one") == errno.ENOSPC

    disk.free()

    assert refusal(disk.path / "one") is None
    assert disk.free_bytes >= SIZE - (64 << 10)


def test_a_read_only_disk_can_be_read(disk: SmallDisk) -> None:
    (disk.path / "one").write_bytes(b"1")
    with open(disk.path / "one", "ab"), pytest.raises(RuntimeError, match="busy"):
        disk.read_only()
    disk.read_only()

    assert refusal(disk.path / "two") == errno.EROFS
    assert (disk.path / "one").read_bytes() == b"1"
    disk.writable()
    assert refusal(disk.path / "two") is None


def test_it_is_gone_while_a_file_there_is_still_open(tmp_path: Path) -> None:
    if reason := missing(tmp_path):
        pytest.skip(reason)
    path = tmp_path / "disk"
    with ExitStack() as kept:
        with SmallDisk(path, SIZE):
            kept.enter_context(open(path / "one", "ab"))

        assert list(path.iterdir()) == []
        assert str(path) not in Path("/proc/mounts").read_text()
