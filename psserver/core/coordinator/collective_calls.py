"""Collective calls of workers: barriers, means and broadcasts of small values."""

from dataclasses import dataclass

from psserver.core.coordinator.participation import Participation
from psserver.core.coordinator.update_rounds import UpdateRounds
from psserver.core.data.stream_loop import StreamLoop
from psserver.core.job.job_state import JobState
from psserver.core.reports.collectives import CollectiveValues
from psserver.core.workers.members import Member, WorkerState


@dataclass(frozen=True, slots=True)
class CollectiveRequest:
    """A worker's part of a collective call.

    Attributes:
        worker: The worker.
        number: Number of the call in its script, from 1 on.
        contribution: What it passes.
        first_open: The first loop that the worker has not left.
    """

    worker: int
    number: int
    contribution: CollectiveValues
    first_open: int


class CollectiveCalls:
    """Serves collective calls. A worker that waits for others takes no part in rounds."""

    def __init__(self, job: JobState, rounds: UpdateRounds, participation: Participation) -> None:
        self._job, self._rounds, self._participation = job, rounds, participation

    def call(self, request: CollectiveRequest, now: float) -> CollectiveValues | None:
        """Return the result of a call; None: other workers are missing."""
        job, collectives = self._job, self._job.collectives
        member = job.member(request.worker, now)
        collectives.contribute(member.worker, request.number, request.contribution)
        registered = (each.worker for each in job.membership.registered())
        job.ledger.leave_loops(member.worker, request.first_open, registered)
        if job.started or len(job.membership.current()) >= job.min_workers:
            collectives.has_begun = True
        self._participation.finish_collectives()
        result = collectives.results.get(request.number)
        if result is None and member.state is WorkerState.ACTIVE:
            job.membership.index.set_state(member, WorkerState.IDLE)
            member.step_timer.discard()
            self._let_others_read(member.worker)
        self._participation.end_loops()
        self._rounds.advance(now)
        return result

    def _let_others_read(self, worker: int) -> None:
        """Free the sources that a worker reads: the others may have no data without them."""
        ledger = self._job.ledger
        for loop in ledger.live():
            if isinstance(loop, StreamLoop):
                loop.rest(worker)
        ledger.news += 1

    def repetition_state(self, worker: int, number: int) -> tuple[object, ...] | None:
        """Return all state that a repeated call can change; None for a first one."""
        job = self._job
        member = job.membership.members.get(worker)
        if member is None or worker not in job.collectives.open.get(number, ()):
            return None
        here = job.membership.index.revision
        begun = job.started, job.collectives.has_begun
        return *begun, job.log.index, here, job.ledger.place(worker, 0)

    def missing(self, number: int) -> list[Member]:
        """Return the members that a call waits for, in worker order."""
        return self._job.collectives.missing(number, self._job.membership.current())
