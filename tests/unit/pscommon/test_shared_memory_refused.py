"""Regions that cannot be shared, and descriptors that must not be mapped, each with its reason."""

import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from errno import ENOMEM, ENOSYS
from pathlib import Path

import pytest

from pscommon.system import shared_memory
from pscommon.system.shared_memory import NoSharedMemoryError, NotSharedError, SharedRegion, attach

NBYTES = 5000
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@pytest.fixture
def region() -> Iterator[SharedRegion]:
    region = SharedRegion(NBYTES)
    yield region
    region.close()


def test_a_system_without_memfd_is_an_error(
    region: SharedRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached = attach(region.share(), NBYTES)

    def refuse(*arguments: object) -> int:
        raise OSError(ENOSYS, os.strerror(ENOSYS))

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(NoSharedMemoryError, match=r"not implemented\. Try: .*`--lanes stream`"):
        region.share()

    region.memory[0] = 3
    assert (region.is_shared, attached[0]) == (True, 3), "the former memory stays"


def test_too_little_memory_is_an_error_that_changes_nothing(
    region: SharedRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    region.memory[:3] = b"abc"
    before = len(os.listdir("/proc/self/fd"))

    def refuse(*arguments: object) -> None:
        raise OSError(ENOMEM, os.strerror(ENOMEM))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(NoSharedMemoryError, match=r"cannot share 0\.0 MiB: Cannot allocate"):
        region.share()

    assert (region.is_shared, region.memory[:4]) == (False, b"abc\0")
    assert len(os.listdir("/proc/self/fd")) == before


def test_other_systems_cannot_share(region: SharedRegion, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(NoSharedMemoryError, match="darwin"):
        region.share()


def test_the_size_of_shared_memory_never_changes(region: SharedRegion) -> None:
    """A process that truncates it would end the others by SIGBUS."""
    descriptor = region.share()

    for nbytes in (0, NBYTES - 1, NBYTES + 1):
        with pytest.raises(PermissionError):
            os.truncate(descriptor, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def memfd(seals: int, nbytes: int = NBYTES) -> int:
    descriptor = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.truncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def regular_file(path: Path) -> int:
    path.write_bytes(bytes(NBYTES))
    return os.open(path, os.O_RDWR)


UNFIT: dict[str, tuple[Callable[[Path], int], str]] = {
    "no seals": (lambda path: memfd(0), "seals SHRINK, GROW and SEAL"),
    **{
        f"a missing seal {seal}": (lambda path, seal=seal: memfd(SEALS & ~seal), "seals SHRINK")
        for seal in (fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL)
    },
    "no memfd": (lambda path: os.memfd_create("other", 0), "seals SHRINK"),
    "a file": (regular_file, "seals SHRINK"),
    "a file in /dev/shm": (
        lambda path: regular_file(Path(f"/dev/shm/{path.parent.name}-{os.getpid()}")),
        "seals SHRINK",
    ),
    "a folder": (lambda path: os.open(path.parent, os.O_RDONLY), "seals SHRINK"),
    "a pipe": (lambda path: os.pipe()[0], "seals SHRINK"),
    "empty": (lambda path: memfd(SEALS, 0), "has 0 bytes, not 5000"),
    "too small": (lambda path: memfd(SEALS, NBYTES - 1), "has 4999 bytes, not 5000"),
    "too large": (lambda path: memfd(SEALS, NBYTES + 1), "has 5001 bytes, not 5000"),
    "sealed against writing": (
        lambda path: memfd(SEALS | fcntl.F_SEAL_WRITE),
        "cannot be mapped: Operation not permitted",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_an_unfit_descriptor_is_refused_before_it_is_mapped(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, words = UNFIT[case]
    mapped = list[object]()
    real = shared_memory._map
    monkeypatch.setattr(
        shared_memory, "_map", lambda *arguments: mapped.append(1) or real(*arguments)
    )
    descriptor = make(tmp_path / "file")
    try:
        with pytest.raises(NotSharedError, match=words):
            attach(descriptor, NBYTES)
    finally:
        os.close(descriptor)
        Path(f"/dev/shm/{tmp_path.name}-{os.getpid()}").unlink(missing_ok=True)

    assert bool(mapped) == ("cannot be mapped" in words)
