"""The coordinator: the one place that decides. It runs on shard 0 and writes the job's log.

Theory of operation. Workers join (a lease), register (the model; the first one uploads the
weights), push to all shards and leave. Shards report, whole, what they have staged. A push that
every shard holds is ready; `advance` asks the policy which ready pushes make the next update and
appends an Apply. All else that can happen to a push is an entry, too: Reject (a shard found NaN,
or it is too old) and Evict (its worker left, or its lease ended). The batches that a push used
are committed with its Apply, so data and weights never disagree.

Nothing here waits. A request that cannot be answered yet gets None, and is asked again when
something has changed. No clock either: `now` is an argument. Requests may be repeated. And
nothing here depends on anything but the requests and their order, so that a coordinator which
died is made again by making its requests again (core/recorder.py).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pscommon.core.data_stream import Spec
from pscommon.core.errors import InvalidRequestError, TooFewWorkersError, out_of_the_job
from pscommon.core.log_entries import BatchKey, Cut
from pscommon.core.model_spec import ModelSpec
from psserver.core.data.draw_groups import units_of
from psserver.core.data.resume_rules import adopted_model, model_mismatch
from psserver.core.job.pending_pushes import PendingPushes
from psserver.core.job.policy import Policy, policy
from psserver.core.job.reshard_phase import ReshardPhase
from psserver.core.job.resharding import Resharding
from psserver.core.job.settings import JobRules
from psserver.core.reports.reported_values import ReportedValues
from psserver.core.workers import replacement
from psserver.core.workers.members import Member, WorkerState
from psserver.core.workers.step_timer import StepTimer


@dataclass(frozen=True, slots=True)
class BatchesReply:
    """Answer to a request for data: numbers to compute on; or none: come back with nothing in
    hand; or the end.

    following: for each number, how many more that come after it belong to the same push
    (--global-batch); empty: each batch may be a push of its own.
    """

    numbers: tuple[int, ...] = ()
    end: bool = False
    following: tuple[int, ...] = ()


class CoordinatorMachine(Resharding):
    """The machine; see the module's text, and Updates for the arguments."""

    def __init__(
        self, shards: int, rules: JobRules, generation: int = 0, epoch: int | None = None
    ) -> None:
        super().__init__(shards, rules, generation, epoch)
        self.reported = ReportedValues()
        self._resumed = False

    # ---- membership ------------------------------------------------------------------------------

    def join(
        self, now: float, rank: int | None, host: str, pid: int, device: str, attempt: int = 0
    ) -> Member:
        """A place for a worker; it counts in no round before it has registered."""
        return self.membership.join(now, rank, host, pid, device, attempt)

    def member(self, worker: int, now: float) -> Member:
        """The worker that sent a request, which renews its lease. FencedError if the job went on
        without it.
        """
        member = self.membership.members.get(worker)
        if member is None or not member.is_current:
            raise out_of_the_job(
                worker, member.reason if member else "it is not a worker of this job"
            )
        member.last_seen = now
        return member

    def alive(self, ago: Mapping[int, float], now: float) -> None:
        """Bytes of these workers have moved so many seconds ago, which renews their leases from
        then.
        """
        for worker in ago.keys() & self.membership.members.keys():
            member = self.membership.members[worker]
            member.last_moved = max(member.last_moved, now - ago[worker])

    def register(
        self, worker: int, spec: ModelSpec, now: float
    ) -> Literal["ready", "upload", "pending"]:
        """State the model. MismatchError lists the differences to the job's."""
        member = self.member(worker, now)
        if self.model is None:
            self.model, self._uploader = spec, worker
        if self._resumed:
            self.model = adopted_model(spec, self.model) or self.model
        if spec.differences(self.model):
            raise model_mismatch(spec, self.model, self.ledger.origin)
        if not self.begun:
            return "upload" if self._uploader == worker else "pending"
        self._resumed = False
        if (successor := replacement.successor(self.membership.registered(), member)) is not None:
            self.remove(
                member, WorkerState.LOST, f"worker {successor.worker} was started in its place", now
            )
            raise out_of_the_job(worker, member.reason)
        self._activate(member, now)
        return "ready"

    def unresolved_peer(self, worker: int, asked_at: float) -> Member | None:
        """Return the worker whose place a registering worker may have to take, if that is open.

        With --on-worker-loss wait the place of a dead worker is kept for its successor. The
        registration waits until the other worker shows a sign of life or its lease ends.
        """
        member = self.membership.members.get(worker)
        if (
            self.rules.on_loss.mode != "wait"
            or member is None
            or member.is_registered
            or not member.is_current
        ):
            return None
        registered = self.membership.registered()
        if replacement.predecessor(registered, member):
            return None
        return replacement.unresolved_peer(registered, member, asked_at)

    def _activate(self, member: Member, now: float) -> None:
        old = (
            None
            if member.is_registered
            else replacement.predecessor(self.membership.registered(), member)
        )
        if self.started and not member.is_registered:
            member.step_timer.begin(now)
        if old is None:
            self.membership.activate(member)
            return self.advance(now)
        self.membership.replace(old, member)
        self.ledger.transfer(old.worker, member.worker)
        return self.remove(
            old, WorkerState.LOST, f"worker {member.worker} was started in its place", now
        )

    def leave(self, worker: int, reason: str, now: float) -> None:
        """The worker is done (reason empty) or gives up. Nobody waits for it any more; repeating
        this is harmless.
        """
        member = self.membership.members.get(worker)
        if member is not None and member.is_current:
            self.remove(member, WorkerState.LEFT, reason, now)

    def drain(self, worker: int, now: float) -> None:
        """Ask a worker to leave at its next step boundary."""
        member = self.membership.members.get(worker)
        if member is None or not member.is_current:
            here = ", ".join(str(m.worker) for m in self.membership.current()) or "none"
            raise InvalidRequestError(f"no worker {worker} is here to be drained; here are: {here}")
        member.draining = True

    def missing(self, worker: int, now: float) -> None:
        """A worker's lease has ended, and its place is kept for a while."""
        self.membership.members[worker].missing_since = now

    def back(self, worker: int, now: float) -> None:
        """A missing worker was heard of again."""
        self.membership.members[worker].missing_since = None

    def lose(self, worker: int, reason: str, now: float) -> None:
        """A worker's lease has ended, for good."""
        member = self.membership.members[worker]
        if member.is_registered and self.rules.on_loss.mode == "abort":
            self.fail(TooFewWorkersError(f"{member} was lost: {reason} (--on-worker-loss abort)"))
        self.remove(member, WorkerState.LOST, reason, now)

    def set_policy(self, row: Policy, now: float) -> None:
        """Another policy from the next update on; everybody starts level, whatever the old one
        let happen.
        """
        self.policy = row
        highest = max((member.clock for member in self.membership.registered()), default=0)
        for member in self.membership.registered():
            member.clock = highest
        self.advance(now)

    def go_by(self, rules: JobRules, now: float) -> None:
        """The operator's settings from now on. A policy that a command set stays, unless they
        name another one now.

        Why the job had to end is over, too: who starts its servers again wants it to go on.
        """
        before, self.rules, self.failure = self.rules, rules, None
        self.membership.lease, self.cuts.every = rules.lease, rules.every
        self.membership.progress_timeout = rules.progress_timeout
        if rules.min_workers != before.min_workers:
            self.min_workers = rules.min_workers
        if rules.policy != before.policy:
            self.set_policy(rules.policy, now)

    # ---- data ------------------------------------------------------------------------------------

    def next_batches(
        self,
        worker: int,
        spec: Spec,
        received: int,
        count: int,
        idle: bool,
        now: float,
        first_open: int | None = None,
    ) -> BatchesReply | None:
        """Data for a worker that has got `received` batches of this loop so far; an answer that
        was lost is repeated.

        idle: it has nothing in hand, and sits out of rounds until there is a batch or the end.
        first_open: it has left all loops before this one, and none since; None: the loop that it
        asks for.
        """
        member = self.member(worker, now)
        if not self.all_here():
            return None
        self._resumed = False  # this worker was here before the servers' process was started again
        units = self.units(spec)
        loop = self.ledger.open(
            worker, spec, first_open, [member.worker for member in self.membership.registered()]
        )
        if loop.ended:
            return _end(member)
        if loop.is_late(worker, received):
            return BatchesReply()
        loop.units = units
        at_once = (
            self.policy.barrier and not self.policy.backup
        )  # who is left behind must not hoard
        # who waits in an earlier loop does not come to this one before that has ended
        there = [
            m.worker
            for m in self.membership.registered()
            if m.waiting is None or m.waiting >= spec.loop
        ]
        together = there if at_once else [worker]
        numbers = loop.take(
            worker, received, count, together if worker in together else [*together, worker]
        )
        for other in self.membership.registered():
            if (other.worker == worker and numbers) or (
                other.waiting == spec.loop and loop.has_dealt(other.worker)
            ):
                self.wake(other)
        if numbers or not idle:
            return BatchesReply(tuple(numbers), following=tuple(loop.following(worker, numbers)))
        if loop.holds(
            worker
        ):  # a rest that is too small for its script to push, or that it pushes after the loop
            return _end(member)
        member.waiting = spec.loop
        if member.state is WorkerState.ACTIVE:
            member.state = WorkerState.IDLE
            member.step_timer.discard()
        self.end_loops()
        self.advance(now)
        return _end(member) if loop.ended else None

    def waits(self, worker: int, spec: Spec) -> tuple[Any, ...] | None:
        """What a request for data of this loop can change, where its worker has asked before and
        waits; else None.
        """
        member = self.membership.members.get(worker)
        if member is None or (self.started and member.waiting != spec.loop):
            return None
        here = [(m.worker, m.state, m.waiting, m.clock) for m in self.membership.current()]
        return (
            self.started,
            self.log.index,
            here,
            self.ledger.place(worker, spec.loop),
            self._resumed,
        )

    def units(self, spec: Spec) -> int | None:
        """How many batches make an update; None: one of each worker."""
        return units_of(self.rules.global_batch, spec) if self.policy.barrier else None

    def return_batches(
        self, worker: int, batches: Iterable[BatchKey], now: float, used: bool = False
    ) -> None:
        """These will not be pushed. Other workers may have them, unless they were used."""
        self.member(worker, now)
        if not used:
            self.ledger.put_back(worker, batches)
            return
        self.ledger.use_up(worker, batches)
        self.end_loops()
        self.advance(now)

    def report_metrics(self, worker: int, metrics: dict[str, float], now: float) -> None:
        """Take values without a history. Only logs of earlier releases have this command."""
        member = self.member(worker, now)
        for name, value in metrics.items():
            self.reported.take_latest(member, name, value)

    def follows(self, shard: int, now: float) -> None:
        """A shard follows the log of this epoch."""
        self.followers.add(shard)

    # ---- snapshots -------------------------------------------------------------------------------

    def cut(self, now: float) -> bool:
        """Snapshot the version that stands, unless one is being written. True: there is a Cut in
        the log.
        """
        if not self.begun or self.cuts.busy or (self.move is not None and not self.move.complete):
            return False
        self.log.append(Cut(self.log.next, self.version))
        self.cuts.begin(self.version, self.log.index, now, {})
        assert self.cuts.cutting is not None
        self.cuts.cutting.state = self.state()
        return True

    def state(self) -> dict[str, Any]:
        """Everything that was decided, as JSON. What shards and workers say about themselves is
        not in it.
        """
        return {
            "epoch": self.epoch,
            "shards": self.shards,
            "layout_index": self.layout_index,
            "move": self.move.state() if self.move is not None else None,
            "version": self.version,
            "index": self.log.index,
            "digest": self.log.digest,
            "samples": self.samples,
            "counts": dict(self.counts),
            "policy": [*self.policy_args()],
            "rules": self.rules.as_json(),
            "started": self.started,
            "min_workers": self.min_workers,
            "cutting": self.cuts.busy,
            "last_cut": self.cuts.last_version,
            "resumed": self._resumed,
            **({"extendable": True} if self.ledger.extendable else {}),
            **self.reported.state(),
            "registered": len(self.membership.registered()),
            "pushes": {str(m.worker): m.seq for m in self.membership},
            "evicted": sorted(self.evicted),
            "followers": sorted(self.followers),
            "roster": self.membership.state(),
            "pending": self.pending.state(),
            "loops": self.ledger.state(),
        }

    def whole(self) -> dict[str, Any]:
        """As `state`, at any moment: with the entries that some shard may still need. With the
        model, for `become`.
        """
        return self.state() | {
            "begun": self.begun,
            "uploader": self._uploader,
            "log": self.log.state(),
            "cut": self.cuts.parts(),
        }

    @property
    def expected(self) -> int:
        """How many workers would come back if the job went back to a snapshot now."""
        return len(self.membership.registered()) if self.started else self.min_workers

    def policy_args(self) -> tuple[str, int | None, int | None, int]:
        """What `policy` made the row of."""
        row = self.policy
        return row.name, row.bound if row.name == "ssp" else None, row.max_staleness, row.backup

    def restore(
        self,
        state: Mapping[str, Any],
        model: ModelSpec,
        now: float,
        before: "CoordinatorMachine | None" = None,
    ) -> None:
        """Go on from a snapshot, with workers yet to come: what they had not pushed then is
        dealt anew.

        before: who led the job just now, under what policy, with how many workers: more than
        these will not come back. None: it was not running; the policy that it had stays, unless
        the settings name another than they did then.
        """
        self._take_numbers(state, model)
        self._resumed = True
        expected = before.expected if before is not None else self.min_workers
        # where all had left, as at the end of a run, those to come are new
        self.min_workers = max(1, min(self.min_workers, state["registered"] or expected, expected))
        if before is not None:
            self.policy = before.policy
        elif JobRules.from_json(state["rules"]).policy == self.rules.policy:
            self.policy = policy(*state["policy"])
        self.reported.recover(state)
        self.ledger.restore(state["loops"])
        self.membership.restore({int(worker): seq for worker, seq in state["pushes"].items()})
        self.cuts.started(self.version, now)

    def become(
        self, whole: Mapping[str, Any], model: ModelSpec | None, now: float, snapshot: int = 0
    ) -> None:
        """Be the coordinator that this is all of. snapshot: the index where the newest was cut;
        it has ended a move of before."""
        self._take_numbers(whole, model)
        self._lay_out(whole["shards"], whole["layout_index"])
        self.move = ReshardPhase.from_state(whole["move"]) if whole["move"] else None
        self._landed = self.move is not None and self.move.index < snapshot
        self.log.recover(whole["log"])
        self.begun, self._uploader, self.epoch = whole["begun"], whole["uploader"], whole["epoch"]
        self.started, self._resumed = whole["started"], whole["resumed"]
        self.policy = policy(*whole["policy"])
        self.reported.recover(whole)
        self.membership.recover(whole["roster"], now)
        self.pending.recover(whole["pending"])
        self.ledger.recover(whole["loops"])
        if whole.get("extendable"):
            self.ledger.resumes()
        self.evicted, self.followers = set(whole["evicted"]), set(whole["followers"])
        self.min_workers = whole["min_workers"]
        self.cuts.recover(whole["last_cut"], whole["cut"], now)

    def recovered(self, now: float, generation: int, resumes: bool = False) -> None:
        """This is a new process: all leases run from now, and nobody writes the snapshot that
        was under way.

        resumes: the next worker may be the first one of another run, and bring what a resumed
        job may change.

        The log may lack its newest lines, and with them workers that joined: their numbers are
        not given again. Where all had left, those to come are new, and the first of them wait
        for the others.
        """
        self.membership.begin_generation(generation)
        if resumes:
            self._resumed = self.begun
            self.ledger.resumes()
        self.started = self.started and not self.membership.have_all_left
        self.cuts.abandon()
        self.cuts.started(self.version, now)
        if self._landed:
            self.settle(now)
        elif self.move is not None:
            self.move.moved.clear()
            self.pending = PendingPushes(self.shards)
        for member in self.membership.current():
            member.last_seen = member.joined_at = now
            member.missing_since, member.step_timer = None, StepTimer()
        self.advance(now)

    def _take_numbers(self, state: Mapping[str, Any], model: ModelSpec | None) -> None:
        self.model, self.begun = model, True
        self.version, self.samples = state["version"], state["samples"]
        self.counts = dict(state["counts"])
        self.log.start(state["index"])


def _end(member: Member) -> BatchesReply:
    """There is no more data for this worker, whether or not it has had any."""
    member.ended = True
    return BatchesReply(end=True)
