"""Our safetensors files: the library reads what was written, bit by bit."""

import hashlib
import os
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load

from pscommon.core.model_spec import ITEMSIZE
from pscommon.snapshot.tensor_file import DTYPES, PART_BYTES, write_tensors

SHAPES = st.lists(st.integers(0, 5), max_size=3)
MODELS = st.dictionaries(
    st.text(max_size=8), st.tuples(SHAPES, st.sampled_from([*DTYPES])), max_size=6
)


def filled(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return (
        torch.randint(0, 2, shape).to(dtype)
        if dtype == torch.bool
        else torch.randint(0, 100, shape).to(dtype)
    )


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
        for name, tensor in expected.items()
    )


@given(MODELS, st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
def test_the_library_reads_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, model: dict[str, Any], metadata: dict[str, str]
) -> None:
    model.pop("__metadata__", None)
    tensors, path = (
        {name: filled(*tensor) for name, tensor in model.items()},
        tmp_path_factory.mktemp("file") / "file",
    )

    digest = write_tensors(path, tensors, metadata)

    assert same(load(path.read_bytes()), tensors)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    with safe_open(path, framework="pt") as file:
        assert (file.metadata() or {}) == metadata


@pytest.mark.parametrize("numbers", [PART_BYTES // 4 - 64, PART_BYTES // 4, 3 * PART_BYTES + 1])
def test_a_file_may_be_larger_than_one_write(tmp_path: Path, numbers: int) -> None:
    tensors = {
        "a": torch.randn(numbers),
        "b": torch.randn(5, dtype=torch.float64),
        "c": torch.randn(numbers),
    }

    digest = write_tensors(tmp_path / "file", tensors, {})

    assert same(load((tmp_path / "file").read_bytes()), tensors)
    assert digest == hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest()


def test_every_value_is_aligned(tmp_path: Path) -> None:
    write_tensors(
        tmp_path / "file", {"a": filled([3], torch.uint8), "b": filled([3], torch.float64)}, {}
    )

    found = load((tmp_path / "file").read_bytes())

    assert [name for name in found if found[name].data_ptr() % found[name].element_size()] == []


def test_all_dtypes_of_models() -> None:
    assert {str(dtype).removeprefix("torch.") for dtype in DTYPES} == set(ITEMSIZE)


def test_a_new_file_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_tensors(tmp_path / "file", {}, {})
    finally:
        os.umask(before)

    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "file", {}, {})


def test_large_tensors_are_written_in_small_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that other threads get the core soon."""
    written: list[int] = []

    class RecordingFile(FileIO):
        def write(self, data: Any) -> int:
            written.append(len(data))
            return super().write(data)

    monkeypatch.setattr(Path, "open", lambda path, mode: BufferedWriter(RecordingFile(path, mode)))
    write_tensors(tmp_path / "file", {"a": torch.randn(PART_BYTES)}, {})

    assert sum(written) == (tmp_path / "file").stat().st_size
    assert max(written) <= PART_BYTES


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "open", lambda path, mode: BufferedWriter(FileIO("/dev/full", "wb")))
    with pytest.raises(OSError, match="No space left"):
        write_tensors(tmp_path / "file", {"a": torch.randn(PART_BYTES)}, {})
