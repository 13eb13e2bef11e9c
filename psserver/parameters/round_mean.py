"""The mean of the pushes of one update, weighted by samples."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain

from pscommon.core.partition import ByteRange, cut
from pscommon.system.thread_team import ThreadTeam
from psserver.parameters.averaging import sum_gradients
from psserver.parameters.gradient_norms import MeanBlock, mean_blocks, squares, total
from psserver.parameters.partition import RoleBuffers, SameGradientRange, ShardPartition
from psserver.parameters.staging import Staging, StagingPool


class RoundMean:
    """Computes means of gradients on one shard, with the threads of a team.

    A tensor without a gradient in some pushes counts as zero there.
    """

    def __init__(self, partition: ShardPartition, pool: StagingPool, team: ThreadTeam) -> None:
        self._partition = partition
        self._pool = pool
        self._team = team

    def square_norm(self, stagings: Sequence[Staging], factors: Sequence[float]) -> float:
        """Return the sum of squares of the mean, in float64."""
        memories = [staging.require_memory() for staging in stagings]
        blocks: list[MeanBlock] = []
        for piece in self._partition.pieces(tuple(staging.absent_here for staging in stagings)):
            views = [
                self._partition.view(memories[push], piece.dtype, *piece.span)
                for push in piece.holders
            ]
            piece_factors = [factors[push] for push in piece.holders]
            blocks += mean_blocks(views, piece_factors, self._partition.padding(piece))
        return total(chain.from_iterable(self._team.map(squares, blocks)))

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
            sum_part = partial(self._sum_part, piece, target, memories, factors)
            parts = self._team.parts(piece.span.nbytes * len(memories))
            self._team.map(sum_part, cut(piece.span, parts))

    def _sum_part(
        self,
        piece: SameGradientRange,
        target: RoleBuffers,
        memories: list[RoleBuffers],
        factors: Sequence[float],
        part: ByteRange,
    ) -> None:
        result, *views = [
            self._partition.view(memory, piece.dtype, *part) for memory in (target, *memories)
        ]
        sum_gradients(
            result,
            [views[push] for push in piece.holders],
            [factors[push] for push in piece.holders],
        )


def share_of_samples(samples: Sequence[int]) -> list[float]:
    """Return the weight of each push in the mean."""
    total_samples = sum(samples)
    return [count / total_samples for count in samples]


def scale_shares(shares: Sequence[float], scales: Sequence[float]) -> list[float]:
    """Return the factor of each push's gradients; no scales: the shares."""
    if not scales:
        return [*shares]
    return [share * scale for share, scale in zip(shares, scales, strict=True)]
