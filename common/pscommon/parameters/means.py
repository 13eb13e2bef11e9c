"""Sums and means of flat tensors: of the gradients of one update, weighted by samples, and of
buffers.

Parts are summed in a fixed and therefore repeatable order. Squares are summed in float64, with the
same bits for any number of threads: a flat range is cut into blocks of one size from its start, a
block into rows of one size, and the rows' sums are added with a single rounding. So the bits depend
only on where the range begins and ends.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from pscommon.parameters.partition import blocks

ROW_ELEMENT_COUNT = 1 << 14
"""Elements that are added at a time: torch splits sums of 32 768 elements and more among its
threads.
"""

_HALF = (torch.float16, torch.bfloat16)

MeanBlock = tuple[Sequence[Tensor], Sequence[float], Tensor]
"""A block of a mean that is not computed yet: one flat part per push, the factor of each part, and
the elements of the block that belong to no tensor. The parts are not modified.
"""


def share_of_samples(samples: Sequence[int]) -> list[float]:
    """Return the weight of each push in the mean."""
    total_samples = sum(samples)
    return [count / total_samples for count in samples]


def scale_shares(shares: Sequence[float], scales: Sequence[float]) -> list[float]:
    """Return the factor of each push's gradients; no scales: the shares."""
    if not scales:
        return [*shares]
    return [share * scale for share, scale in zip(shares, scales, strict=True)]


def sum_tensors(target: Tensor, parts: Sequence[Tensor], factors: Sequence[float]) -> None:
    """Compute target = sum of factor * part, in the order given.

    All are flat, of one length and one floating dtype. The first part may be the target itself.
    16-bit parts are summed in float32 and rounded once. A single part with factor 1 is copied bit
    by bit.
    """
    if len(parts) == 1 and factors[0] == 1.0:
        if parts[0].data_ptr() != target.data_ptr():
            target.copy_(parts[0])
        return
    if target.dtype in _HALF:
        for block, first, *rest in blocks(target, *parts):
            wide = first.float().mul_(factors[0])
            for part, factor in zip(rest, factors[1:], strict=True):
                wide.add_(part.float(), alpha=factor)
            block.copy_(wide)
        return
    torch.mul(parts[0], factors[0], out=target)
    for part, factor in zip(parts[1:], factors[1:], strict=True):
        target.add_(part, alpha=factor)


def mean_of_values(target: Tensor, parts: Sequence[Tensor], factors: Sequence[float]) -> None:
    """Compute the weighted mean of buffer values: flat parts of one length and one dtype.

    The mean is first + sum of factor * (part - first). So a value that is equal in all parts (a
    constant, an infinity in an attention mask) stays exact.
    """
    if len(parts) == 1:
        target.copy_(parts[0])
        return
    wide = torch.promote_types(target.dtype, torch.float32)
    for block, first, *rest in blocks(target, *parts):
        base = first.to(wide)
        mean = base.clone()
        for part, factor in zip(rest, factors[1:], strict=True):
            change = part.to(wide).sub(base).nan_to_num_(0.0, math.inf, -math.inf)
            mean.add_(change, alpha=factor)
        block.copy_(mean)


def total(squares: Iterable[float]) -> float:
    """Return the sum, rounded once, so that its order does not matter; inf on overflow."""
    try:
        return math.fsum(squares)
    except OverflowError:
        return math.inf


def blocks_of_mean(
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
        yield block, factors, padding[first:last] - start
        start = stop


def squares_of_mean(block: MeanBlock) -> list[float]:
    """Return the sums of squares of the rows of a mean as sum_tensors computes it."""
    parts, factors, padding = block
    if len(parts) == 1 and factors[0] == 1.0 and not len(padding):
        mean = parts[0]
    else:
        mean = torch.empty_like(parts[0])
        sum_tensors(mean, parts, factors)
        mean.index_fill_(0, padding, 0.0)
    rows_stop = len(mean) // ROW_ELEMENT_COUNT * ROW_ELEMENT_COUNT
    rows, rest = mean[:rows_stop].view(-1, ROW_ELEMENT_COUNT), mean[rows_stop:]
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).tolist() if rows_stop else []
    if len(rest):
        norms.append(torch.linalg.vector_norm(rest, dtype=torch.float64).item())
    return [norm * norm for norm in norms]
