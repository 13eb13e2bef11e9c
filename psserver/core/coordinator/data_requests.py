"""Requests of workers for batches, and batches that they return."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pscommon.core.data_stream import Spec, StreamSpec
from pscommon.core.log_entries import BatchKey
from psserver.core.coordinator.participation import Participation
from psserver.core.coordinator.update_rounds import UpdateRounds
from psserver.core.data.loop import LoopLedger
from psserver.core.job.job_state import JobState
from psserver.core.workers.members import Member, WorkerState


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A worker's request for batches of a loop.

    Attributes:
        worker: The worker.
        spec: The loop.
        received: Batches of the loop that it has; a lost answer is repeated.
        count: Most batches of an answer.
        idle: The worker has no batch. It leaves the rounds until there is one or the end.
        first_open: The first loop that the worker has not left; None: this one.
    """

    worker: int
    spec: Spec
    received: int
    count: int
    idle: bool
    first_open: int | None = None


@dataclass(frozen=True, slots=True)
class BatchesReply:
    """Answer to a request for data.

    Attributes:
        numbers: Batches to compute on; empty: the worker asks again when it has no batch left.
        end: Whether the loop has no more data.
        following: For each number, how many later batches belong to the same push
            (--global-batch). Empty: each batch may be a push of its own.
    """

    numbers: tuple[int, ...] = ()
    end: bool = False
    following: tuple[int, ...] = ()


class DataRequests:
    """Leases batches to workers, and takes unused ones back."""

    def __init__(self, job: JobState, rounds: UpdateRounds, participation: Participation) -> None:
        self._job, self._rounds, self._participation = job, rounds, participation

    def lease(self, request: BatchRequest, now: float) -> BatchesReply | None:
        """Lease batches to a worker; None: there are none yet."""
        job, worker, spec = self._job, request.worker, request.spec
        member = job.member(worker, now)
        if not job.has_started():
            return None
        job.is_resumed = False  # this worker was a member before the restart of the servers
        units = job.units(spec)
        registered = (member.worker for member in job.membership.registered())
        loop = job.ledger.open(worker, spec, request.first_open, registered)
        if loop.ended:
            return _end(member)
        if loop.leases.is_late(worker, request.received):
            return BatchesReply()
        loop.units = units
        numbers = loop.take(worker, request.received, request.count, self._sharers(worker, spec))
        self._wake_receivers(loop, worker if numbers else None)
        if numbers or not request.idle:
            return BatchesReply(tuple(numbers), following=tuple(loop.following(worker, numbers)))
        # the script keeps a rest that is too small to push, or pushes it after the loop
        if loop.leases.has_sent(worker):
            return _end(member)
        job.membership.index.wait_for_data(member, spec.loop)
        if member.state is WorkerState.ACTIVE:
            job.membership.index.set_state(member, WorkerState.IDLE)
            member.step_timer.discard()
        self._participation.end_loops()
        self._rounds.advance(now)
        return _end(member) if loop.ended else None

    def _sharers(self, worker: int, spec: Spec) -> Iterator[int]:
        """Yield the workers that a draw for this worker deals to, in order."""
        job, is_included, is_stream = self._job, False, isinstance(spec, StreamSpec)
        policy = job.policy
        # backup workers must not collect batches
        if policy.barrier and not policy.backup:
            for member in job.membership.registered():
                # workers that wait in an earlier loop come to this one only after its end, and
                # those in a collective call perhaps wait for one that reads the source
                is_late = member.waiting is not None and member.waiting < spec.loop
                if not is_late and not (is_stream and job.collectives.is_waiting(member.worker)):
                    is_included = is_included or member.worker == worker
                    yield member.worker
        if not is_included:
            yield worker

    def _wake_receivers(self, loop: LoopLedger, served: int | None) -> None:
        """Wake the worker that got batches now, and those for which batches wait in the loop."""
        membership = self._job.membership
        waiting = membership.index.waiting.get(loop.spec.loop, {})
        receivers = [w for w in waiting.keys() & loop.leases.with_ready() if loop.has_dealt(w)]
        for worker in sorted({*receivers, *([] if served is None else [served])}):
            if (member := membership.members[worker]).is_registered:
                self._participation.wake(member)

    def repetition_state(self, worker: int, spec: Spec) -> tuple[object, ...] | None:
        """Return all state that a repeated request for data can change; None for a first one."""
        job = self._job
        member = job.membership.members.get(worker)
        if member is None or (job.started and member.waiting != spec.loop):
            return None
        return (
            job.started,
            job.log.index,
            job.membership.index.revision,
            job.ledger.place(worker, spec.loop),
            job.is_resumed,
        )

    def give_back(self, worker: int, batches: Iterable[BatchKey], now: float) -> None:
        """Free batches that a worker will not push."""
        self._job.member(worker, now)
        self._job.ledger.put_back(worker, batches)

    def commit_evaluated(self, worker: int, batches: Iterable[BatchKey], now: float) -> None:
        """Commit batches that a worker has only evaluated."""
        self._job.member(worker, now)
        self._job.ledger.use_up(worker, batches)
        self._participation.end_loops()
        self._rounds.advance(now)


def _end(member: Member) -> BatchesReply:
    """Return the end of the loop and note that the worker was told."""
    member.ended = True
    return BatchesReply(end=True)
