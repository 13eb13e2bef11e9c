"""The coordinator's part of a reshard; reshard_phase.py describes the protocol."""

from pscommon.core.log_entries import Reshard, ShardReport
from psserver.core.coordinator.update_rounds import UpdateRounds
from psserver.core.job.job_state import JobState
from psserver.core.job.reshard_phase import ReshardPhase


class Resharding:
    """Changes the number of shards."""

    def __init__(self, job: JobState, rounds: UpdateRounds) -> None:
        self._job, self._rounds = job, rounds

    def start(self, shards: int, writes_snapshot: bool) -> bool:
        """Start a reshard. Return False if it is not possible now, see can_start.

        Args:
            shards: New number of shards.
            writes_snapshot: Whether it ends with a snapshot.
        """
        job = self._job
        if not self.can_start(shards):
            return False
        job.log.append(Reshard(job.log.next, job.version, shards))
        job.reshard = ReshardPhase(job.shards, shards, job.log.index, writes_snapshot)
        job.is_reshard_saved = False
        job.set_shard_count(shards, job.log.index)
        job.log.members(job.following_shards, job.log.index)
        return True

    def can_start(self, shards: int) -> bool:
        """Return whether all shards follow, there are weights, and nothing else is in progress."""
        job = self._job
        follow = job.followers >= set(range(job.shards))
        return (
            job.begun
            and follow
            and not job.cuts.busy
            and job.reshard is None
            and shards != job.shards
        )

    def has_loaded_partition(self, report: ShardReport) -> bool:
        """Return whether a shard reports for the first time that it has its new part."""
        reshard = self._job.reshard
        if (
            reshard is None
            or report.log_id != self._job.log_id
            or report.is_resharding
            or report.index < reshard.index
        ):
            return False
        return report.shard < reshard.shards and report.shard not in reshard.loaded_shards

    def record_loaded(self, shard: int) -> None:
        """Note that a shard has its new part."""
        if self._job.reshard is not None:
            self._job.reshard.loaded_shards.add(shard)

    def finish(self, now: float) -> None:
        """End the reshard: pushes count again, and removed shards are dropped."""
        job = self._job
        if job.reshard is None or not (job.reshard.complete or job.is_reshard_saved):
            return
        job.reshard, job.is_reshard_saved = None, False
        job.log.members(job.shards, job.log.index)
        job.followers &= set(range(job.shards))
        self._rounds.advance(now)

    def continue_after_restart(self, now: float) -> None:
        """Continue in a new process: a reshard whose snapshot is written ends, another one starts
        over.
        """
        if self._job.is_reshard_saved:
            self.finish(now)
        elif self._job.reshard is not None:
            self._job.reshard.loaded_shards.clear()
            self._job.pending.clear(self._job.shards)

    def restart_shard(self, shard: int) -> None:
        """Note that a shard's process is new and may be behind its earlier reports.

        During a reshard it has lost its new part, whatever its log contains.
        """
        job = self._job
        job.cuts.shard_lost(shard)
        job.log.back(shard)
        if job.reshard is not None and shard < job.shards:
            job.cuts.abandon()
            job.reshard.loaded_shards.discard(shard)
            job.pending.shard_lost(shard)

    def is_stranded(self, report: ShardReport) -> bool:
        """Return whether a shard waits for its part of a reshard that has ended."""
        return (
            report.log_id == self._job.log_id and report.is_resharding and self._job.reshard is None
        )
