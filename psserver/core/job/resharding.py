"""The coordinator's part of a reshard; reshard_phase.py describes the protocol."""

from pscommon.core.log_entries import Reshard, ShardReport
from psserver.core.job.pending_pushes import PendingPushes
from psserver.core.job.reshard_phase import ReshardPhase
from psserver.core.job.settings import JobRules
from psserver.core.job.update_rounds import UpdateRounds


class Resharding(UpdateRounds):
    """Update rounds on shards whose number may change."""

    def __init__(
        self, shards: int, rules: JobRules, generation: int = 0, epoch: int | None = None
    ) -> None:
        super().__init__(shards, rules, generation, epoch)
        self.followers: set[int] = set()
        self._landed = (
            False  # the snapshot that this machine goes on from ends the move that it speaks of
        )

    def reshard(self, shards: int, keeps: bool, now: float) -> bool:
        """Start a reshard. Return False if it is not possible now, see can_reshard.

        Args:
            shards: New number of shards.
            keeps: Whether snapshots are written.
            now: The time.
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
        """Return whether all shards follow, there are weights, and nothing else is in progress."""
        follow = self.followers >= set(range(self.shards))
        return (
            self.begun
            and follow
            and not self.cuts.busy
            and self.move is None
            and shards != self.shards
        )

    def _lay_out(self, shards: int, index: int) -> None:
        """Set the number of shards and drop all pending pushes: they have the old partition."""
        self.shards = self.cuts.shards = shards
        self.layout_index = index
        self.pending = PendingPushes(shards)

    @property
    def members(self) -> int:
        """Number of shards that follow the log."""
        return self.move.members if self.move is not None else self.shards

    def has_moved(self, report: ShardReport) -> bool:
        """Return whether a shard reports for the first time that it has its new part."""
        move = self.move
        if move is None or report.epoch != self.epoch or report.moving or report.index < move.index:
            return False
        return report.shard < move.shards and report.shard not in move.moved

    def moved(self, shard: int, now: float) -> None:
        """Note that a shard has its new part."""
        if self.move is not None:
            self.move.moved.add(shard)

    def settle(self, now: float) -> None:
        """End the reshard: pushes count again, and removed shards are dropped."""
        if self.move is None or not (self.move.complete or self._landed):
            return
        self.move, self._landed = None, False
        self.log.members(self.shards, self.log.index)
        self.followers &= set(range(self.shards))
        self.advance(now)

    def reborn(self, shard: int, now: float) -> None:
        """Note that a shard's process is new and may be behind its earlier reports.

        During a reshard it has lost its new part, whatever its log contains.
        """
        self.cuts.shard_lost(shard)
        self.log.back(shard)
        if self.move is not None and shard < self.shards:
            self.cuts.abandon()
            self.move.moved.discard(shard)
            self.pending.shard_lost(shard)

    def is_stranded(self, report: ShardReport) -> bool:
        """Return whether a shard waits for its part of a reshard that has ended."""
        return report.epoch == self.epoch and report.moving and self.move is None
