"""Which members take part in update rounds: idle ones return, departed ones are removed."""

from operator import attrgetter

from pscommon.core.log_entries import Evict
from psserver.core.job.job_state import JobState
from psserver.core.workers.members import Member, WorkerState


class Participation:
    """Changes who takes part; it appends no update, so its caller advances the rounds."""

    def __init__(self, job: JobState) -> None:
        self._job = job

    def wake(self, member: Member) -> None:
        """Let an idle member take part again."""
        self._job.membership.index.stop_waiting(member)
        if member.state is WorkerState.IDLE:
            self._job.membership.activate(member)

    def end_loops(self) -> None:
        """End loops of which every batch has counted, and activate the workers that waited.

        A loop ends for all workers at once: until then a lost worker's batches may be dealt
        again. A worker without a part in an update (--global-batch) is active for the next one.
        """
        membership = self._job.membership
        for number, members in sorted(membership.index.waiting.items()):
            loop = self._job.ledger.loops[number]
            if loop.done:
                loop.end()
            # only with --global-batch may a push let others have batches that were dealt before
            if loop.ended or loop.units is not None:
                for member in sorted(members.values(), key=attrgetter("rank", "worker")):
                    if loop.ended or loop.has_dealt(member.worker):
                        self.wake(member)
        if self._job.is_stalled:
            self._free_unreachable_batches()

    def _free_unreachable_batches(self) -> None:
        """Free batches that were dealt to workers which wait elsewhere, for those that wait here.

        Without this, workers in different passes would wait for each other for ever: a worker
        validates alone, or the others are in a collective call.
        """
        ledger, index = self._job.ledger, self._job.membership.index
        for number in sorted(index.waiting):
            loop = ledger.loops[number]
            if loop.name is None:
                continue
            for worker in sorted(loop.leases.dealt.keys() - index.waiting[number].keys()):
                loop.give_back(worker, list(loop.leases.ready(worker)))
                ledger.news += 1

    def finish_collectives(self) -> None:
        """Give results to the collective calls that wait for no member, and activate the workers
        that waited.
        """
        job = self._job
        for worker in job.collectives.finish(job.membership.current()):
            job.membership.index.answered.add(worker)
            if (member := job.membership.members[worker]).waiting is None:
                self.wake(member)

    def remove(self, member: Member, state: WorkerState, reason: str) -> None:
        """Remove a current member, and free its batches."""
        job = self._job
        job.membership.remove(member, state, reason)
        job.ledger.give_back(member.worker)
        job.pending.drop(member.worker)
        job.collectives.drop(member.worker)
        job.reduction.drop(member.worker)
        if job.uploading_worker == member.worker and not job.begun:
            job.model = job.uploading_worker = None
        self._evict(member.worker, reason or "it left the job")
        self.finish_collectives()
        self.end_loops()

    def evict_unknown(self, worker: int, index: int) -> None:
        """Evict the unknown worker of a reported push, so that the shards drop the push.

        Args:
            worker: The worker.
            index: Number of entries that the shard has carried out. A shard that has carried out
                all of them and still has the push has forgotten the earlier Evict.
        """
        if worker not in self._job.evicted or index >= self._job.log.index:
            self._evict(worker, "it is not a worker of this job any more")

    def _evict(self, worker: int, reason: str) -> None:
        self._job.evicted.add(worker)
        self._job.log.append(Evict(self._job.log.next, worker, reason))

    def forget_departed(self, keep: int) -> None:
        """Forget all but the newest departed members. A push of a forgotten one evicts it again."""
        self._job.membership.forget_departed(keep)
        self._job.evicted &= self._job.membership.members.keys()
