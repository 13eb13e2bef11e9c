"""Reads of weights: one version each during updates, and no unnecessary copy."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pscommon.core.partition import ByteRange
from pscommon.parameters.partition import RoleBuffers
from pscommon.wire.frames import FRAME_BYTES, decode_response
from psserver.parameters.store import ParameterStore
from psserver.parameters.weight_reads import WeightRead, WeightReads
from tests.support.stores import SGD, begun, model, one_thread  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")

SPEC = model(
    ((900_001,), "float32"),
    ((3,), "float32"),
    ((50,), "float32", "buffer"),
    ((40,), "float32", "frozen"),
    optimizer=SGD,
)
"""3.6 MB, so four frames."""


class CountingShard:
    """One shard whose values start at 0 and decrease by one with each step (a buffer takes the
    pushed value).
    """

    def __init__(self) -> None:
        self.job = begun(SPEC, values={t.name: torch.zeros(t.shape) for t in SPEC.tensors})
        self.store = self.job.stores[0]
        self.version = 0

    def step(self) -> None:
        self.version += 1
        buffer = torch.full((50,), -float(self.version))
        self.job.step({"t0": torch.ones(900_001), "t1": torch.ones(3), "t2": buffer})


def frames(reading: WeightRead) -> Iterator[Tensor]:
    """Return the numbers of each frame."""
    for frame in reading.frames():
        yield torch.frombuffer(bytearray(decode_response(frame).data), dtype=torch.float32)


def version_of(numbers: Tensor) -> int:
    """Return the version of a read; fail where two versions are mixed."""
    found = numbers[~numbers.isnan() & (numbers != 0)]
    if not len(found):
        return 0
    least, highest = torch.aminmax(found)
    assert least == highest, f"several versions: {least} to {highest}"
    return int(-least)


def address(memory: RoleBuffers) -> int:
    return memory["trainable"].data_ptr()


def test_all_frames_but_the_last_are_full_and_hold_everything() -> None:
    reading = CountingShard().store.read()
    sizes = [decode_response(frame).data.nbytes for frame in reading.frames()]

    assert sizes[:-1] == [FRAME_BYTES] * 3
    assert sum(sizes) == reading.nbytes == sum(view.nbytes for view in reading.views())


@pytest.mark.parametrize("read_before", [0, 1, 3])
def test_a_read_shows_one_version_while_updates_are_applied(read_before: int) -> None:
    job = CountingShard()
    job.step()
    reading = job.store.read()
    expected = b"".join(reading.views())
    stream = reading.frames()
    got = [decode_response(next(stream)).data for _ in range(read_before)]
    job.step()
    got += [decode_response(next(stream)).data]
    job.step()
    got += [decode_response(frame).data for frame in stream]
    reading.close()

    assert b"".join(got) == expected
    assert version_of(torch.cat(list(frames(job.store.read())))) == 3


def test_concurrent_reads_show_their_own_versions() -> None:
    job = CountingShard()
    readings = []
    for _ in range(4):
        readings += [job.store.read(), job.store.read(everything=True)]
        job.step()
    streams = [frames(reading) for reading in readings]
    seen = [{version_of(next(stream)) for _ in range(3)} for stream in streams]
    last = [version_of(torch.cat(list(stream))) for stream in streams]

    assert seen == [{0}, {0}, {1}, {1}, {2}, {2}, {3}, {3}]
    assert last == [0, 0, 1, 1, 2, 2, 3, 3]
    for reading in readings:
        reading.close()


def test_a_completed_read_shows_no_later_version_to_others() -> None:
    """A read that opens after the update shares nothing with an earlier one."""
    job = CountingShard()
    old = job.store.read()
    job.step()
    new = job.store.read()
    old.close()
    job.step()

    assert {version_of(part) for part in frames(new)} == {1}
    new.close()


class CountedReads:
    """Reads of one tensor, whose copies are counted and freed at most once."""

    def __init__(self) -> None:
        ranges = {"trainable": ByteRange(0, 64)}
        self.weights = RoleBuffers({"trainable": torch.zeros(64, dtype=torch.uint8)}, ranges)
        self.out: list[RoleBuffers] = []
        self.copies = 0
        self.readings = WeightReads(self._copy, self._free)

    def open(self) -> WeightRead:
        return self.readings.open(self.weights, [ByteRange(0, 64)])

    def update(self) -> None:
        self.readings.freeze()
        self.weights["trainable"].add_(1)

    def _copy(self) -> RoleBuffers:
        self.copies += 1
        copy = {"trainable": self.weights["trainable"].clone()}
        self.out.append(RoleBuffers(copy, self.weights.ranges))
        return self.out[-1]

    def _free(self, memory: RoleBuffers) -> None:
        self.out = [each for each in self.out if each is not memory]


def test_nothing_is_copied_without_readers() -> None:
    counted = CountedReads()
    for _ in range(3):
        counted.update()
    reading = counted.open()
    assert list(reading.frames())
    reading.close()
    counted.update()

    assert counted.copies == 0


def test_a_read_whose_frames_are_complete_needs_no_copy() -> None:
    counted = CountedReads()
    through, half = counted.open(), counted.open()
    content = b"".join(through.frames())
    counted.update()
    assert counted.copies == 1  # for the second read
    half.close()
    counted.update()
    through.close()

    assert counted.copies == 1
    assert counted.out == []
    assert not any(decode_response(content).data)


def test_reads_of_a_version_share_a_copy_which_the_last_one_frees() -> None:
    counted = CountedReads()
    readings = [counted.open() for _ in range(3)]
    counted.update()
    counted.update()
    assert counted.copies == 1
    later = counted.open()
    counted.update()
    assert (counted.copies, len(counted.out)) == (2, 2)

    for reading in readings[:2]:
        reading.close()
        reading.close()
        assert len(counted.out) == 2
    readings[2].close()
    assert len(counted.out) == 1
    later.close()
    later.close()
    assert counted.out == []


def test_close_is_allowed_at_any_time_and_twice() -> None:
    job = CountingShard()
    never_read, half_read, copied = (job.store.read() for _ in range(3))
    never_read.close()
    next(half_read.frames())
    half_read.close()
    job.step()
    stream = frames(copied)
    next(stream)
    for _ in range(2):
        for reading in (never_read, half_read, copied):
            reading.close()
    job.step()

    assert version_of(torch.cat(list(frames(job.store.read())))) == 2


def test_a_copy_returns_to_the_pool() -> None:
    job = CountingShard()
    store = job.store
    reading = store.read()
    job.step()
    place = address(reading.memory)
    reading.close()
    stagings = [store.allocate_staging() for _ in range(2)]

    assert place in {address(staging.memory) for staging in stagings if staging.memory is not None}
    for staging in stagings:
        store.release(staging)


@pytest.mark.full
def test_memory_is_bounded_over_200_updates_with_slow_readers() -> None:
    """Four readers, each one frame per update: at most one copy each, besides the push's buffer."""
    job, buffers = CountingShard(), set()
    store = job.store
    readings = [store.read() for _ in range(4)]
    streams = [reading.frames() for reading in readings]
    for update in range(200):
        job.step()
        for place, reading in enumerate(readings):
            buffers.add(address(reading.memory))
            if next(streams[place], None) is None or update % 7 == place:
                reading.close()
                readings[place] = store.read()
                streams[place] = readings[place].frames()
    buffers -= {address(reading.memory) for reading in [store.read()]}

    assert 1 < len(buffers) <= 5
    for reading in readings:
        reading.close()


def test_threads_read_consistent_versions_during_updates() -> None:
    job, changing = CountingShard(), threading.Lock()
    seen: set[int] = set()
    mixed: list[AssertionError] = []
    done = threading.Event()

    def read(store: ParameterStore) -> None:
        while not done.is_set():
            with changing:
                reading = store.read()
            try:
                seen.add(version_of(torch.cat(list(frames(reading)))))
            except AssertionError as error:
                mixed.append(error)
            reading.close()

    threads = [threading.Thread(target=read, args=(job.store,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    steps = 0
    while not mixed and (steps < 60 or len(seen) <= 3):  # the system schedules the threads
        with changing:
            job.step()
        steps += 1
    done.set()
    for thread in threads:
        thread.join(30)

    assert mixed == []
