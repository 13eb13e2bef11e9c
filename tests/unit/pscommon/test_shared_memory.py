"""A region keeps its bytes and address, whatever happens to its memfd; within one process."""

import gc
import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from pscommon.system.shared_memory import SharedRegion, attach
from tests.support.shared_memory import mapped_count

SIZES = [0, 1, mmap.PAGESIZE - 1, mmap.PAGESIZE, mmap.PAGESIZE + 1, 1_000_003]


def address(memory: memoryview) -> int:
    return int(np.asarray(memory).__array_interface__["data"][0])


def pattern(nbytes: int) -> bytes:
    return np.random.default_rng(7).bytes(nbytes)


def address_space() -> int:
    """Return the bytes that this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


def opened() -> int:
    """Return how many descriptors of regions this process has."""
    entries = Path("/proc/self/fd").iterdir()
    return sum("/memfd:paramserver" in os.path.realpath(entry) for entry in entries)


@pytest.mark.parametrize("nbytes", SIZES)
def test_bytes_and_address_do_not_change(nbytes: int) -> None:
    region = SharedRegion(nbytes)
    start, expected = address(region.memory), pattern(nbytes)
    assert (bytes(region.memory), region.memory.format, region.memory.readonly) == (
        bytes(nbytes),
        "B",
        False,
    )
    region.memory[:] = expected

    shared, private = [region.share], [region.detach, region.detach]
    for change in (*shared, *private, *shared, region.share, *private):
        change()
        assert region.is_shared == (change not in private)
        assert region.memory == expected
        assert address(region.memory) == start
        assert nbytes == 0 or start % mmap.PAGESIZE == 0
    region.close()


@pytest.mark.parametrize("nbytes", SIZES)
def test_an_attached_region_is_the_same_memory_until_detach(nbytes: int) -> None:
    region = SharedRegion(nbytes)
    region.memory[:] = pattern(nbytes)
    attached = attach(region.share(), nbytes)
    assert (bytes(attached), attached.readonly, attached.format) == (
        pattern(nbytes),
        False,
        "B",
    )

    region.memory[:] = bytes(nbytes)
    assert attached == bytes(nbytes)
    attached[:] = b"\x01" * nbytes
    assert region.memory == b"\x01" * nbytes

    region.detach()
    region.memory[:] = b"\x02" * nbytes
    assert attached == b"\x01" * nbytes
    attached[:] = b"\x03" * nbytes
    assert region.memory == b"\x02" * nbytes
    region.close()


def test_sharing_again_disconnects_the_old_memory() -> None:
    region = SharedRegion(100)
    first = attach(region.share(), 100)
    second = attach(region.share(), 100)

    region.memory[0] = 9
    assert (first[0], second[0]) == (0, 9)
    region.close()


def test_arrays_and_tensors_never_move() -> None:
    region = SharedRegion(4096)
    array = np.frombuffer(region.memory, dtype=np.float32)
    tensor = torch.frombuffer(region.memory, dtype=torch.float32)
    array[:] = np.arange(1024)
    attached = attach(region.share(), 4096)
    theirs = torch.frombuffer(attached, dtype=torch.float32)
    assert torch.equal(theirs, torch.arange(1024, dtype=torch.float32))

    theirs.mul_(2)
    assert (array[3], float(tensor[3])) == (6.0, 6.0)
    region.detach()
    theirs.zero_()
    tensor.add_(1)
    assert (array[3], array[1023]) == (7.0, 2047.0)
    region.close()


def test_a_reader_sees_the_same_bytes_during_a_remap() -> None:
    """A mapping that is filled after the switch would show zeros."""
    region = SharedRegion(1 << 20)
    region.memory[:] = b"\x05" * (1 << 20)
    array = np.frombuffer(region.memory, dtype=np.uint8)
    done, started, seen = threading.Event(), threading.Event(), set[int]()

    def read() -> None:
        while not done.is_set():
            seen.update((int(array.min()), int(array.max())))
            started.set()

    reader = threading.Thread(target=read)
    reader.start()
    started.wait()
    try:
        for _ in range(20):
            region.share()
            region.detach()
    finally:
        done.set()
        reader.join()
    assert seen == {5}
    region.close()


def test_memory_is_freed_after_close_and_the_last_view() -> None:
    gc.collect()
    before = mapped_count()
    region = SharedRegion(5000)
    attached = attach(region.share(), 5000)
    array, tensor = (
        np.frombuffer(region.memory, dtype=np.uint8),
        torch.frombuffer(attached, dtype=torch.uint8),
    )
    del attached
    for _ in range(2):
        region.close()
    assert (len(region.memory), region.is_shared) == (0, False)
    region.detach()
    with pytest.raises(ValueError, match="closed"):
        region.share()

    array[4999] = 8
    assert int(tensor[4999]) == 8
    del array
    gc.collect()
    assert mapped_count() == before + 1
    assert int(tensor[4999]) == 8
    del tensor
    gc.collect()
    assert mapped_count() == before


def test_a_view_that_is_released_does_not_free_the_memory() -> None:
    region = SharedRegion(5000)
    attached = attach(region.share(), 5000)
    with region.memory as memory:
        memory[0] = 5
    gc.collect()
    attached[1] = 6

    region.detach()
    assert attached[:2] == bytes([5, 6])
    region.close()


def test_private_memory_is_freed_too() -> None:
    before = address_space()
    for _ in range(20):
        SharedRegion(1 << 30).close()

    assert address_space() - before < 1 << 30


def test_shared_memory_has_one_descriptor() -> None:
    """Forks map it again."""
    gc.collect()  # garbage of earlier tests may own some
    before = opened()
    region = SharedRegion(100)
    for _ in range(3):
        attach(region.share(), 100)
        assert opened() == before + 1
    region.detach()
    assert opened() == before
    region.share()
    del region
    assert opened() == before
