"""The generation of a job never repeats after a crash, a full disk or a damaged file."""

import errno
import os
from pathlib import Path

import pytest

from pscommon.core.errors import SnapshotError
from pscommon.snapshot.atomic_files import AtomicFiles
from psserver.process.generation_file import SLOT_BYTES, GenerationCounter, GenerationFile


def next_generation(folder: Path, least: int = 0) -> int:
    return GenerationFile(folder).count_up(least)


class TornWriteSystem(AtomicFiles):
    """System that crashes after some bytes of a write in place."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def overwrite(self, path: Path, offset: int, data: bytes) -> None:
        super().overwrite(path, offset, data[: self.nbytes])
        raise OSError(errno.EIO, os.strerror(errno.EIO))


class NoNewFiles(AtomicFiles):
    """Full disk: only existing bytes of a file can be written."""

    def write(self, path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_generations_ascend_from_zero(tmp_path: Path) -> None:
    assert [next_generation(tmp_path) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert next_generation(tmp_path, least=9) == 9
    assert next_generation(tmp_path) == 10


def test_a_start_needs_no_new_or_larger_file(tmp_path: Path) -> None:
    next_generation(tmp_path)
    assert GenerationFile(tmp_path, NoNewFiles()).count_up(0) == 1
    assert (tmp_path / "generation").stat().st_size == 2 * SLOT_BYTES
    assert [path.name for path in tmp_path.iterdir()] == ["generation"]


@pytest.mark.parametrize("nbytes", [0, 1, 4000, 4080, 4085, 4090, SLOT_BYTES - 1, SLOT_BYTES])
@pytest.mark.parametrize("starts", [1, 2, 3])
def test_a_torn_write_leaves_the_previous_generation(
    tmp_path: Path, nbytes: int, starts: int
) -> None:
    numbers = [next_generation(tmp_path) for _ in range(starts)]
    with pytest.raises(OSError, match="Input/output"):
        GenerationFile(tmp_path, TornWriteSystem(nbytes)).count_up(0)

    assert next_generation(tmp_path) > max(numbers)


@pytest.mark.parametrize("slot", [0, 1])
def test_one_damaged_slot_repeats_no_generation(tmp_path: Path, slot: int) -> None:
    """The damaged slot may have held the newest generation."""
    numbers = [next_generation(tmp_path) for _ in range(4)]
    path = tmp_path / "generation"
    raw = bytearray(path.read_bytes())
    raw[slot * SLOT_BYTES + SLOT_BYTES - 4] ^= 1
    path.write_bytes(raw)

    numbers += [next_generation(tmp_path), next_generation(tmp_path)]
    assert len(set(numbers)) == 6
    assert numbers == sorted(numbers)


def test_a_file_of_earlier_releases_is_read(tmp_path: Path) -> None:
    (tmp_path / "generation").write_text("41")
    assert [next_generation(tmp_path), next_generation(tmp_path)] == [42, 43]


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 2 * SLOT_BYTES, b"x", b"1 2", b"\xa5\x0f\x3c" * SLOT_BYTES],
    ids=["empty", "zeros", "a letter", "two numbers", "noise"],
)
def test_a_damaged_file_names_a_remedy_that_works(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "generation"
    path.write_bytes(content)
    generations = GenerationCounter(tmp_path)

    with pytest.raises(SnapshotError, match=f"Try: echo 100000 > {path}") as raised:
        generations.count()
    assert raised.value.exit_code == 12
    assert path.read_bytes() == content

    path.write_text("100000\n")
    generations.count()
    assert generations.number == 100_001


def test_a_full_disk_names_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first start, and the first with an old file, need space."""
    monkeypatch.setattr(AtomicFiles, "write", NoNewFiles.write)
    generations = GenerationCounter(tmp_path)
    with pytest.raises(
        SnapshotError, match=rf"No space left on device. Try: free 8192 bytes in {tmp_path}"
    ):
        generations.count()


def test_a_folder_in_place_of_the_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "generation").mkdir()
    with pytest.raises(OSError, match="directory"):
        next_generation(tmp_path)
