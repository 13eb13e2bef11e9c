"""Reports of shards about staged pushes: what is new in them, and what the job does with it."""

from pscommon.core.log_entries import PushKey, ShardReport, Staged
from psserver.core.coordinator.participation import Participation
from psserver.core.coordinator.update_rounds import UpdateRounds
from psserver.core.job.job_state import JobState


class PushReports:
    """Processes the reports of shards. A report on another log is ignored."""

    def __init__(self, job: JobState, rounds: UpdateRounds, participation: Participation) -> None:
        self._job, self._rounds, self._participation = job, rounds, participation

    def process(self, report: ShardReport, now: float) -> None:
        """Record what a shard has staged and measured, and append the updates that follow."""
        job = self._job
        if report.log_id != job.log_id:
            return
        job.log.reached(report.shard, report.index)
        if not job.is_of_shard_count(report):
            return
        is_change = False
        for staged in report.staged:
            is_change |= self._record_staged(report, staged, now)
        if job.pending.measurement is not None and report.measured is not None:
            job.pending.measurement.take(report)
            is_change = True
        if is_change:
            self._rounds.advance(now)

    def new_pushes(self, report: ShardReport) -> list[Staged]:
        """Return the pushes that a shard, which follows the log, has not reported before."""
        job, found = self._job, list[Staged]()
        if not job.is_of_shard_count(report):
            return found
        for staged in report.staged:
            key = staged.key
            if job.pending.holds(report.shard, key):
                continue
            member = job.membership.members.get(key.worker)
            if member is None or key.seq > member.seq or not member.is_current or not job.begun:
                found.append(staged)
        return found

    def has_measured(self, report: ShardReport) -> bool:
        """Return whether a report has a new answer to the current Measure."""
        measurement = self._job.pending.measurement
        return (
            measurement is not None
            and self._job.is_of_shard_count(report)
            and measurement.is_answered_by(report)
        )

    def is_undecided(self, key: PushKey) -> bool:
        """Return whether this is a push of a member that nothing has been decided on."""
        member = self._job.membership.members.get(key.worker)
        return member is not None and member.is_current and key.seq > member.seq

    def refuse(self, worker: int, seq: int, reason: str, detail: str, now: float) -> None:
        """Reject a push that cannot be applied. Its batches stay leased: its worker may return
        them.
        """
        if self.is_undecided(key := PushKey(worker, seq)):
            self._rounds.reject(key, reason, f"push {seq} of worker {worker} refused: {detail}")
            self._rounds.advance(now)

    def _record_staged(self, report: ShardReport, staged: Staged, now: float) -> bool:
        """Record a staged push. Return whether updates may follow."""
        job, key = self._job, staged.key
        member = job.membership.members.get(key.worker)
        if member is None or not member.is_current:
            self._participation.evict_unknown(key.worker, report.index)
            return True
        if key.seq <= member.seq and not (key.seq == 0 and not job.begun):
            return False
        if staged.problem and job.reshard is not None:
            return False  # the shard reports it again
        if staged.problem:
            reason, _, detail = staged.problem.partition(": ")
            self._rounds.reject_bad(staged, reason, f"{member}: {detail}", now)
            return True
        is_ready = job.pending.staged(report.shard, staged)
        if is_ready and staged.samples:
            member.step_timer.end(now)
        return is_ready or job.pending.has_several(key.worker)
