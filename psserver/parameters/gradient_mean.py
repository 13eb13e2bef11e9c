"""The mean of the pushes of one update, weighted by samples, and the norm of that mean.

Pushes are summed in a fixed and therefore repeatable order. Squares are summed in float64, with the
same bits for any number of threads: a flat range is cut into blocks of one size from its start, a
block into rows of one size, and the rows' sums are added with a single rounding. So the bits depend
only on where the range begins and ends.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor

from pscommon.core.partition import ByteRange, cut
from pscommon.system.thread_team import ThreadTeam
from psserver.parameters.partition import RoleBuffers, SameGradientRange, ShardPartition, blocks
from psserver.parameters.staging import Staging, StagingPool

ROW_ELEMENT_COUNT = 1 << 14
"""Elements that are added at a time: torch splits sums of 32 768 elements and more among its
threads.
"""

_HALF = (torch.float16, torch.bfloat16)

MeanBlock = tuple[Sequence[Tensor], Sequence[float], Tensor]
"""A block of a mean that is not computed yet: one flat part per push, the factor of each part, and
the elements of the block that belong to no tensor. The parts are not modified.
"""


class GradientMean:
    """Computes means of gradients on one shard, with the threads of a team.

    A tensor without a gradient in some pushes counts as zero there.
    """

    def __init__(self, partition: ShardPartition, pool: StagingPool, team: ThreadTeam) -> None:
        self._partition, self._pool, self._team = partition, pool, team

    def square_norm(self, stagings: Sequence[Staging], factors: Sequence[float]) -> float:
        """Return the sum of squares of the mean, in float64."""
        partition, memories = self._partition, [each.require_memory() for each in stagings]
        found: list[MeanBlock] = []
        for piece in partition.pieces(tuple(staging.absent_here for staging in stagings)):
            views = [
                partition.view(memories[push], piece.dtype, *piece.span) for push in piece.holders
            ]
            piece_factors = [factors[push] for push in piece.holders]
            found += _mean_blocks(views, piece_factors, partition.padding(piece))
        return total(chain.from_iterable(self._team.map(_squares_of_mean, found)))

    @contextmanager
    def sum_gradients(
        self, stagings: Sequence[Staging], factors: Sequence[float]
    ) -> Iterator[RoleBuffers]:
        """Yield the sum of factor * gradient, in this order.

        Overwrites the memory of the first staging, unless that is a worker's.
        """
        memories = [staging.require_memory() for staging in stagings]
        if list(factors) == [1.0]:
            yield memories[0]
            return
        is_in_place = stagings[0].is_server_memory
        target = memories[0] if is_in_place else self._pool.take_buffers()
        try:
            self._sum_pieces(target, stagings, memories, factors)
            yield target
        finally:
            if not is_in_place:
                self._pool.return_buffers(target)

    def _sum_pieces(
        self,
        target: RoleBuffers,
        stagings: Sequence[Staging],
        memories: list[RoleBuffers],
        factors: Sequence[float],
    ) -> None:
        for piece in self._partition.pieces(tuple(staging.absent_here for staging in stagings)):

            def sum_part(part: ByteRange, piece: SameGradientRange = piece) -> None:
                result, *views = [
                    self._partition.view(memory, piece.dtype, *part)
                    for memory in (target, *memories)
                ]
                parts = [views[push] for push in piece.holders]
                sum_tensors(result, parts, [factors[push] for push in piece.holders])

            parts_count = self._team.parts(piece.span.nbytes * len(memories))
            self._team.map(sum_part, cut(piece.span, parts_count))


def share_of_samples(samples: Sequence[int]) -> list[float]:
    """Return the weight of each push in the mean."""
    total_samples = sum(samples)
    return [count / total_samples for count in samples]


def scale_shares(shares: Sequence[float], scales: Sequence[float]) -> list[float]:
    """Return the factor of each push's gradients; no scales: the shares."""
    if not scales:
        return [*shares]
    return [share * scale for share, scale in zip(shares, scales, strict=True)]


# ---- tensors -------------------------------------------------------------------------------------


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


def _mean_blocks(
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


def _squares_of_mean(block: MeanBlock) -> list[float]:
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
