"""Collective calls of workers: barriers, means and broadcasts of small values."""

from dataclasses import dataclass

from pscommon.core.script_place import ScriptPlace
from psserver.core.coordinator.participation import Participation
from psserver.core.coordinator.update_rounds import UpdateRounds
from psserver.core.data.stream_loop import StreamLoop
from psserver.core.job.job_state import JobState
from psserver.core.workers.collectives import NUMBERED, CallKey, CollectiveValues
from psserver.core.workers.members import Member, WorkerState


@dataclass(frozen=True, slots=True)
class CollectiveRequest:
    """A worker's part of a collective call.

    Attributes:
        worker: The worker.
        number: Number of the call since the last outermost training pass began in its script, from
            1 on; without a place: in the script.
        contribution: What it passes.
        first_open: The first loop that the worker has not left.
        place: Where its script is; None: `first_open` counts.
    """

    worker: int
    number: int
    contribution: CollectiveValues
    first_open: int
    place: ScriptPlace | None = None

    @property
    def key(self) -> CallKey:
        passes = NUMBERED if self.place is None else self.place.training_passes
        return CallKey(passes, self.number)


class CollectiveCalls:
    """Serves collective calls. A worker that waits for others takes no part in rounds."""

    def __init__(self, job: JobState, rounds: UpdateRounds, participation: Participation) -> None:
        self._job, self._rounds, self._participation = job, rounds, participation

    def call(self, request: CollectiveRequest, now: float) -> CollectiveValues | None:
        """Return the result of a call; None: other workers are missing."""
        job, collectives = self._job, self._job.collectives
        member = job.member(request.worker, now)
        collectives.contribute(member.worker, request.key, request.contribution)
        registered = (each.worker for each in job.membership.registered())
        place = request.first_open if request.place is None else request.place
        job.ledger.leave_loops(member.worker, place, registered)
        if job.started or len(job.membership.current()) >= job.min_workers:
            collectives.has_begun = True
        self._participation.finish_collectives()
        result = collectives.results.get(request.key)
        if result is None and member.state is WorkerState.ACTIVE:
            job.membership.index.set_state(member, WorkerState.IDLE)
            member.step_timer.discard()
            if request.place is not None:  # a log of an earlier release replays without this
                self._let_others_read(member.worker)
        self._participation.end_loops()
        self._rounds.advance(now)
        return result

    def _let_others_read(self, worker: int) -> None:
        """Free the sources that a worker reads: the others may have no data without them."""
        ledger = self._job.ledger
        for loop in ledger.live.values():
            if isinstance(loop, StreamLoop):
                loop.rest(worker)
        ledger.news += 1

    def repetition_state(self, worker: int, key: CallKey) -> tuple[object, ...] | None:
        """Return all state that a repeated call can change; None for a first one."""
        job = self._job
        member = job.membership.members.get(worker)
        if member is None or worker not in job.collectives.open.get(key, ()):
            return None
        here = job.membership.index.revision
        begun = job.started, job.collectives.has_begun
        return *begun, job.log.index, here, job.ledger.place(worker, 0)

    def missing(self, key: CallKey) -> list[Member]:
        """Return the members that a call waits for, in worker order."""
        return self._job.collectives.missing(key, self._job.membership.current())
