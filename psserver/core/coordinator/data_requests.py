"""Requests of workers for batches, batches that they return, and the share that each can expect."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pscommon.core.data_stream import Spec, StreamSpec
from pscommon.core.log_entries import BatchKey
from pscommon.core.script_place import ScriptPlace
from psserver.core.coordinator.participation import Participation
from psserver.core.coordinator.update_rounds import UpdateRounds
from psserver.core.data.loop import LoopLedger
from psserver.core.data.stream_loop import StreamLoop
from psserver.core.job.job_state import JobState
from psserver.core.workers.members import Member, WorkerState
from psserver.core.workers.replacement import predecessor


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
        place: Where its script is: it names the pass, whose number the job decides. None: the
            numbers of `spec` and `first_open` count.
    """

    worker: int
    spec: Spec
    received: int
    count: int
    idle: bool
    first_open: int | None = None
    place: ScriptPlace | None = None


@dataclass(frozen=True, slots=True)
class BatchesReply:
    """Answer to a request for data.

    Attributes:
        numbers: Batches to compute on; empty: the worker asks again when it has no batch left.
        end: Whether the loop has no more data.
        following: For each number, how many later batches belong to the same push
            (--global-batch). Empty: each batch may be a push of its own.
        spec: The job's spec of the loop; None: not known. It is not compared.
    """

    numbers: tuple[int, ...] = ()
    end: bool = False
    following: tuple[int, ...] = ()
    spec: Spec | None = field(default=None, compare=False)


class DataRequests:
    """Leases batches to workers, and takes unused ones back."""

    def __init__(self, job: JobState, rounds: UpdateRounds, participation: Participation) -> None:
        self._job, self._rounds, self._participation = job, rounds, participation

    def lease(self, request: BatchRequest, now: float) -> BatchesReply | None:
        """Lease batches to a worker; None: there are none yet."""
        job, worker = self._job, request.worker
        member = job.member(worker, now)
        if not job.has_started():
            return None
        job.is_resumed = False  # this worker was a member before the restart of the servers
        spec = self._find(request)
        units = job.units(spec)
        loop = self._open(request, spec)
        if loop.ended:
            return _end(member, spec)
        if loop.leases.is_late(worker, request.received):
            return BatchesReply(spec=spec)
        loop.units = units
        sharers = self._sharers(worker, loop)
        numbers = loop.take(worker, request.received, request.count, sharers)
        self._wake_receivers(loop, worker if numbers else None)
        if numbers or not request.idle:
            following = tuple(loop.following(worker, numbers))
            return BatchesReply(tuple(numbers), following=following, spec=spec)
        # the script keeps a rest that is too small to push, or pushes it after the loop
        if loop.leases.has_sent(worker):
            loop.was_left = True
            return _end(member, spec)
        job.membership.index.wait_for_data(member, spec.loop)
        if member.state is WorkerState.ACTIVE:
            job.membership.index.set_state(member, WorkerState.IDLE)
            member.step_timer.discard()
        self._participation.end_loops()
        self._rounds.advance(now)
        return _end(member, spec) if loop.ended else None

    def _find(self, request: BatchRequest) -> Spec:
        """Return the spec of the request with the job's number of the pass."""
        ledger = self._job.ledger
        return ledger.passes.find(request.spec, request.place, ledger.known_loops)

    def _open(self, request: BatchRequest, spec: Spec) -> LoopLedger:
        """Open the loop for a worker. If it gets more epochs, drop the collective results after
        it.
        """
        job, place = self._job, request.place
        registered = (member.worker for member in job.membership.registered())
        before = job.ledger.extensions
        loop = job.ledger.open(request.worker, spec, place or request.first_open, registered)
        if place is not None and job.ledger.extensions > before:
            job.collectives.drop_results(place.training_passes)
        return loop

    def _sharers(self, worker: int, loop: LoopLedger) -> Iterator[int]:
        """Yield the workers that a draw for this worker deals to, in order."""
        job, policy, is_included = self._job, self._job.policy, False
        # backup workers must not collect batches
        if policy.barrier and not policy.backup:
            for member in job.membership.registered():
                if self._may_come(member, loop):
                    is_included = is_included or member.worker == worker
                    yield member.worker
        if not is_included:
            yield worker

    def _may_come(self, member: Member, loop: LoopLedger) -> bool:
        """Return whether a worker can ask for batches of a loop before others need them.

        A worker that waits in a loop inside this one comes back to this one.
        """
        is_elsewhere = member.waiting not in (None, loop.spec.loop)
        if loop.name is None:  # numbered loops have the order of the script
            return not is_elsewhere or (member.waiting or 0) > loop.spec.loop
        if self._job.is_stalled:
            return member.waiting == loop.spec.loop
        if isinstance(loop, StreamLoop) and self._job.collectives.is_waiting(member.worker):
            return False  # it perhaps waits for a worker that reads the source
        return not is_elsewhere or loop.leases.has_asked(member.worker)

    def _wake_receivers(self, loop: LoopLedger, served: int | None) -> None:
        """Wake the worker that got batches now, and those for which batches wait in the loop."""
        membership = self._job.membership
        waiting = membership.index.waiting.get(loop.spec.loop, {})
        receivers = [w for w in waiting.keys() & loop.leases.dealt.keys() if loop.has_dealt(w)]
        for worker in sorted({*receivers, *([] if served is None else [served])}):
            if (member := membership.members[worker]).is_registered:
                self._participation.wake(member)

    def repetition_state(self, request: BatchRequest) -> tuple[object, ...] | None:
        """Return all state that a repeated request for data can change; None for a first one."""
        job, worker = self._job, request.worker
        spec = self._find(request)
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

    def share(self, worker: int, spec: Spec) -> int:
        """Return the number of batches of a loop that a worker gets if no worker comes or goes.

        Under sync it is exact, because the ledger deals in worker order. Under async, ssp and
        --backup-workers it is an even part. Before the first round it assumes --min-workers
        workers. A stream has no length: the result is 0.

        Raises:
            InvalidRequestError: --global-batch does not fit the loop's batch_size.
        """
        if isinstance(spec, StreamSpec):
            return 0
        workers, place = self._team(worker)
        units = self._job.units(spec)
        if units is None:
            return _part(spec.total, workers, place)
        draws, rest = divmod(spec.batches_in_epoch, units)
        return spec.epochs * (draws * _part(units, workers, place) + _part(rest, workers, place))

    def _team(self, worker: int) -> tuple[int, int]:
        """Return the number of workers that share a loop, and the position of this worker."""
        job, membership = self._job, self._job.membership
        team = membership.registered() if job.started else membership.current()
        member = membership.members.get(worker)
        # it is about to register
        if member is not None and member.is_current and member not in team:
            replaced = predecessor(membership.registered(), member)
            team = sorted(
                [*(m for m in team if m is not replaced), member], key=lambda m: (m.rank, m.worker)
            )
        workers = max(len(team), 1 if job.started else job.min_workers)
        if member not in team:
            return workers, workers - 1
        assert member is not None
        if not job.started and member.ranked and member.rank < workers:
            return workers, member.rank
        return workers, team.index(member)


def _end(member: Member, spec: Spec) -> BatchesReply:
    """Return the end of the loop and note that the worker was told."""
    member.ended = True
    return BatchesReply(end=True, spec=spec)


def _part(batches: int, workers: int, place: int) -> int:
    return batches // workers + (place < batches % workers)
