"""weights_sha256 depends on the bytes in the order of names, and on nothing else."""

import hashlib

import numpy as np
import pytest

from pscommon.snapshot import weights_sha256


def test_the_digest_covers_the_bytes_in_the_order_of_names() -> None:
    named = {"b": np.arange(3, dtype="<i4"), "a": np.float32([[1.5], [2.5]]), "B": b"xyz"}
    expected = b"xyz" + np.float32([1.5, 2.5]).tobytes() + np.arange(3, dtype="<i4").tobytes()

    assert weights_sha256(named) == hashlib.sha256(expected).hexdigest()


@pytest.mark.parametrize("empty", [{}, {"a": b""}, {"a": np.zeros((0, 3))}, {"a": memoryview(b"")}])
def test_empty_tensors_add_nothing(empty: dict[str, object]) -> None:
    assert weights_sha256(empty) == hashlib.sha256(b"").hexdigest()


def test_scalars_and_views_are_hashed_by_their_bytes() -> None:
    value = np.array(2.0)

    assert weights_sha256({"a": value}) == weights_sha256({"z": memoryview(value.tobytes())})


def test_a_strided_array_is_refused() -> None:
    with pytest.raises((ValueError, BufferError)):
        weights_sha256({"a": np.zeros((4, 4))[:, 1]})
