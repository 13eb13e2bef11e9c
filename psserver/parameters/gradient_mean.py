"""The mean of the pushes of one update, weighted by samples, and the norm of that mean.

Pushes are summed in a fixed and therefore repeatable order, with the bits of
pscommon/parameters/means.py.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

from pscommon.core.partition import ByteRange, cut
from pscommon.parameters.means import MeanBlock, blocks_of_mean, squares_of_mean, sum_tensors, total
from pscommon.parameters.partition import RoleBuffers, SameGradientRange, ShardPartition
from pscommon.system.thread_team import ThreadTeam
from psserver.parameters.staging import Staging, StagingPool


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
            found += blocks_of_mean(views, piece_factors, partition.padding(piece))
        return total(chain.from_iterable(self._team.map(squares_of_mean, found)))

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
