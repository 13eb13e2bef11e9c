"""A small disk that is full, freed, read-only and unmounted as requested."""

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


def write_errno(path: Path, nbytes: int = 1) -> int | None:
    """Return the errno of writing a file."""
    try:
        path.write_bytes(bytes(nbytes))
    except OSError as error:
        return error.errno
    return None


def test_a_full_disk_accepts_bytes_again_after_it_is_freed(disk: SmallDisk) -> None:
    disk.fill(leave=100 << 10)
    assert write_errno(disk.path / "fits", 90 << 10) is None
    assert write_errno(disk.path / "does not", 20 << 10) == errno.ENOSPC
    (disk.path / "fits").unlink()
    (disk.path / "does not").unlink()
    disk.fill()
    assert write_errno(disk.path / "one") == errno.ENOSPC

    disk.free()

    assert write_errno(disk.path / "one") is None
    assert disk.free_bytes >= SIZE - (64 << 10)


def test_a_read_only_disk_can_be_read(disk: SmallDisk) -> None:
    (disk.path / "one").write_bytes(b"1")
    with open(disk.path / "one", "ab"), pytest.raises(RuntimeError, match="busy"):
        disk.read_only()
    disk.read_only()

    assert write_errno(disk.path / "two") == errno.EROFS
    assert (disk.path / "one").read_bytes() == b"1"
    disk.writable()
    assert write_errno(disk.path / "two") is None


def test_the_disk_is_unmounted_although_a_file_is_open(tmp_path: Path) -> None:
    if reason := missing(tmp_path):
        pytest.skip(reason)
    path = tmp_path / "disk"
    with ExitStack() as open_file:
        with SmallDisk(path, SIZE):
            open_file.enter_context(open(path / "one", "ab"))

        assert list(path.iterdir()) == []
        assert str(path) not in Path("/proc/mounts").read_text()
