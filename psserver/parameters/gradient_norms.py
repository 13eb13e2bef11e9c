"""Sums of squares of gradients and of their means, in float64.

The bits are the same for any number of threads. A flat range is cut into blocks of one size from
its start, a block into rows of one size, and the rows' sums are added with a single rounding. So
the bits depend only on where the range begins and ends.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from psserver.parameters.averaging import sum_gradients
from psserver.parameters.partition import blocks

ROW_ELEMENT_COUNT = 1 << 14
"""Elements that are added at a time: torch splits sums of 32 768 elements and more among its
threads.
"""


class MeanBlock(NamedTuple):
    """A block of a mean that is not computed yet.

    parts: one flat part per push, of one dtype; they are not modified.
    factors: factor of each part.
    padding: elements of the block that belong to no tensor.
    """

    parts: Sequence[Tensor]
    factors: Sequence[float]
    padding: Tensor


def mean_blocks(
    parts: Sequence[Tensor], factors: Sequence[float], padding: Tensor
) -> Iterator[MeanBlock]:
    """Yield the blocks of flat parts. padding: as in MeanBlock, for all elements, ascending."""
    start = 0
    for block in blocks(*parts):
        stop = start + len(block[0])
        first, last = (
            torch.searchsorted(padding, torch.tensor([start, stop])).tolist()
            if len(padding)
            else (0, 0)
        )
        yield MeanBlock(block, factors, padding[first:last] - start)
        start = stop


def squares(block: MeanBlock) -> list[float]:
    """Return the sums of squares of the rows of a mean as sum_gradients computes it."""
    parts, factors, padding = block
    if len(parts) == 1 and factors[0] == 1.0 and not len(padding):
        return _squares(parts[0])
    mean = torch.empty_like(parts[0])
    sum_gradients(mean, parts, factors)
    return _squares(mean.index_fill_(0, padding, 0.0))


def total(squares: Iterable[float]) -> float:
    """Return the sum, rounded once, so that its order does not matter; inf on overflow."""
    try:
        return math.fsum(squares)
    except OverflowError:
        return math.inf


def _squares(flat: Tensor) -> list[float]:
    rows_stop = len(flat) // ROW_ELEMENT_COUNT * ROW_ELEMENT_COUNT
    rows, rest = flat[:rows_stop].view(-1, ROW_ELEMENT_COUNT), flat[rows_stop:]
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).tolist() if rows_stop else []
    if len(rest):
        norms.append(torch.linalg.vector_norm(rest, dtype=torch.float64).item())
    return [norm * norm for norm in norms]
