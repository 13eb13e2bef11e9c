"""The coordinator's part in a move to another number of shards; what one is, says move.py."""

from pscommon.core.log_entries import Reshard, ShardReport
from psserver.core.job.pending_pushes import PendingPushes
from psserver.core.job.reshard_phase import ReshardPhase
from psserver.core.job.settings import JobRules
from psserver.core.job.update_rounds import UpdateRounds


class Resharding(UpdateRounds):
    """Updates, of shards whose number may change."""

    def __init__(
        self, shards: int, rules: JobRules, generation: int = 0, epoch: int | None = None
    ) -> None:
        super().__init__(shards, rules, generation, epoch)
        self.followers: set[int] = set()
        self._landed = (
            False  # the snapshot that this machine goes on from ends the move that it speaks of
        )

    def reshard(self, shards: int, keeps: bool, now: float) -> bool:
        """The model moves to so many shards. keeps: snapshots are written. False: not now, see
        can_reshard.
        """
        if not self.can_reshard(shards):
            return False
        self.log.append(Reshard(self.log.next, self.version, shards))
        self.move = ReshardPhase(self.shards, shards, self.log.index, keeps)
        self._landed = False
        self._lay_out(shards, self.log.index)
        self.log.members(self.members, self.log.index)
        return True

    def can_reshard(self, shards: int) -> bool:
        """Do all shards follow, are there weights to move elsewhere, and is nothing else under
        way?
        """
        follow = self.followers >= set(range(self.shards))
        return (
            self.begun
            and follow
            and not self.cuts.busy
            and self.move is None
            and shards != self.shards
        )

    def _lay_out(self, shards: int, index: int) -> None:
        """Nothing of what was staged fits."""
        self.shards = self.cuts.shards = shards
        self.layout_index = index
        self.pending = PendingPushes(shards)

    @property
    def members(self) -> int:
        """How many shards follow the log."""
        return self.move.members if self.move is not None else self.shards

    def has_moved(self, report: ShardReport) -> bool:
        """Is it news that this shard holds its new part?"""
        move = self.move
        if move is None or report.epoch != self.epoch or report.moving or report.index < move.index:
            return False
        return report.shard < move.shards and report.shard not in move.moved

    def moved(self, shard: int, now: float) -> None:
        """A shard holds its new part."""
        if self.move is not None:
            self.move.moved.add(shard)

    def settle(self, now: float) -> None:
        """The move is over, whoever dies now: pushes count again, and who has left is not asked
        any more.
        """
        if self.move is None or not (self.move.complete or self._landed):
            return
        self.move, self._landed = None, False
        self.log.members(self.shards, self.log.index)
        self.followers &= set(range(self.shards))
        self.advance(now)

    def reborn(self, shard: int, now: float) -> None:
        """A shard's process is new, and may be behind what the one before it said. In a move,
        what it held of the new layout is gone, whatever its log says."""
        self.cuts.shard_lost(shard)
        self.log.back(shard)
        if self.move is not None and shard < self.shards:
            self.cuts.abandon()
            self.move.moved.discard(shard)
            self.pending.shard_lost(shard)

    def is_stranded(self, report: ShardReport) -> bool:
        """Does this shard wait for what nobody keeps any more, because the move is over?"""
        return report.epoch == self.epoch and report.moving and self.move is None
