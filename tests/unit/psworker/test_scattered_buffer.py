"""Flat buffers with parts elsewhere."""

from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pscommon.core.partition import ByteRange
from psworker.client.arrays import Array, overlap
from psworker.exchange.transfer import ScatteredBuffer

SIZE = 40
ELSEWHERE = 100


@given(
    st.lists(st.integers(1, 9), max_size=8),
    st.sets(st.integers(0, 7)),
    st.integers(0, SIZE),
    st.integers(0, SIZE),
)
def test_a_range_has_the_bytes_of_the_parts_and_else_of_the_flat_buffer(
    lengths: list[int], chosen: set[int], first: int, second: int
) -> None:
    cuts = [cut for cut in accumulate(lengths, initial=0) if cut <= SIZE]
    spans = [span for index, span in enumerate(pairwise(cuts)) if index in chosen]
    flat, content = bytearray(range(SIZE)), bytearray(range(SIZE))
    for start, stop in spans:
        content[start:stop] = bytes(ELSEWHERE + byte for byte in range(start, stop))
    buffer = ScatteredBuffer(
        memoryview(flat),
        {start: memoryview(bytes(content[start:stop])) for start, stop in spans},
    )
    start, stop = sorted((first, second))

    views = list(buffer.cut(ByteRange(start, stop)))

    assert b"".join(views) == content[start:stop]
    assert all(view.nbytes for view in views)


def test_it_is_read_only_with_a_read_only_part() -> None:
    flat = memoryview(bytearray(SIZE))

    assert ScatteredBuffer(flat, {8: memoryview(bytes(8))}).readonly
    assert not ScatteredBuffer(flat, {8: memoryview(bytearray(8))}).readonly


MEMORY = np.zeros(10, np.float32)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({}, {"a": MEMORY}, False),
        ({"a": MEMORY}, {"b": MEMORY}, True),
        ({"a": MEMORY[:5]}, {"b": MEMORY[5:]}, False),
        ({"a": MEMORY[:6]}, {"b": MEMORY[5:]}, True),
        ({"a": MEMORY, "b": MEMORY[2:3]}, {"c": MEMORY[8:]}, True),
        ({"a": MEMORY[:2], "b": MEMORY[4:6]}, {"c": MEMORY[2:4], "d": MEMORY[6:]}, False),
    ],
)
def test_arrays_that_share_memory_are_found(
    first: dict[str, Array], second: dict[str, Array], expected: bool
) -> None:
    assert overlap(first, second) == overlap(second, first) == expected
