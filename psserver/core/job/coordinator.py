"""The coordinator: it runs on shard 0, decides, and writes the job's log.

Theory of operation. One process orders all decisions; every shard carries them out in that order
(a replicated state machine with a single leader). A gradient counts on all shards or on none,
because an Apply is written only after every shard has reported the push (the voting phase of a
two-phase commit).

States of a job: no weights, weights but fewer than --min-workers workers, training, resharding,
failed. States of a worker: see workers/members.py.

Events: workers join, register, push, ask for data, and leave. Shards report what they have
staged. Leases end. An operator changes the policy or the number of shards, or asks for a
snapshot.

Decisions are log entries: Begin, Apply, Reject, Evict, Measure, Cut, Reshard. `advance` asks the
policy which ready pushes make the next update (update_rounds.py). resharding.py has the change
of the number of shards.

Invariants:

- The batches of a push are committed with its Apply, so data and weights always agree.
- A request never blocks. One that cannot be answered yet gets None, and the caller repeats it
  after a change.
- Requests may be repeated without effect.
- The state depends only on the commands and their order. Time is an argument of each command. A
  coordinator is therefore recovered by replaying its commands (commands/recorder.py).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pscommon.core.data_stream import Spec
from pscommon.core.errors import InvalidRequestError, TooFewWorkersError, out_of_the_job
from pscommon.core.log_entries import BatchKey, Cut
from pscommon.core.model_spec import ModelSpec
from psserver.core.data.draw_groups import units_of
from psserver.core.data.loop import LoopLedger
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


class CoordinatorMachine(Resharding):
    """The machine; the text of the module describes it, UpdateRounds the arguments."""

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
        """Add a worker. No round waits for it before it has registered."""
        return self.membership.join(now, rank, host, pid, device, attempt)

    def member(self, worker: int, now: float) -> Member:
        """Return the worker of a request and renew its lease.

        Raises:
            FencedError: The worker is not a member any more.
        """
        member = self.membership.members.get(worker)
        if member is None or not member.is_current:
            raise out_of_the_job(
                worker, member.reason if member else "it is not a worker of this job"
            )
        member.last_seen = now
        return member

    def alive(self, ago: Mapping[int, float], now: float) -> None:
        """Renew leases from the last transfer; `ago` has the seconds since then by worker."""
        for worker in ago.keys() & self.membership.members.keys():
            member = self.membership.members[worker]
            member.last_moved = max(member.last_moved, now - ago[worker])

    def register(
        self, worker: int, spec: ModelSpec, now: float
    ) -> Literal["ready", "upload", "pending"]:
        """Register a worker with its model.

        Raises:
            MismatchError: The model is not the job's; the message lists the differences.
        """
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
        """Remove a worker that is done (empty reason) or gives up."""
        member = self.membership.members.get(worker)
        if member is not None and member.is_current:
            self.remove(member, WorkerState.LEFT, reason, now)

    def drain(self, worker: int, now: float) -> None:
        """Ask a worker to leave after its current step."""
        member = self.membership.members.get(worker)
        if member is None or not member.is_current:
            here = ", ".join(str(m.worker) for m in self.membership.current()) or "none"
            raise InvalidRequestError(
                f"worker {worker} cannot be drained: it is not a member. Members: {here}"
            )
        member.draining = True

    def missing(self, worker: int, now: float) -> None:
        """Note that a lease has ended and the worker's place is kept for a while."""
        self.membership.members[worker].missing_since = now

    def back(self, worker: int, now: float) -> None:
        """Note that a missing worker has shown a sign of life."""
        self.membership.members[worker].missing_since = None

    def lose(self, worker: int, reason: str, now: float) -> None:
        """Remove a worker whose lease has ended."""
        member = self.membership.members[worker]
        if member.is_registered and self.rules.on_loss.mode == "abort":
            self.fail(TooFewWorkersError(f"{member} was lost: {reason} (--on-worker-loss abort)"))
        self.remove(member, WorkerState.LOST, reason, now)

    def set_policy(self, row: Policy, now: float) -> None:
        """Change the policy from the next update on. All registered workers get one clock."""
        self.policy = row
        highest = max((member.clock for member in self.membership.registered()), default=0)
        for member in self.membership.registered():
            member.clock = highest
        self.advance(now)

    def go_by(self, rules: JobRules, now: float) -> None:
        """Use the operator's settings after a restart of the servers, and clear a failure.

        A policy that a command set stays unless the settings name another one than before.
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
        """Lease batches to a worker; None: none yet.

        Args:
            worker: The worker.
            spec: The loop.
            received: Batches of the loop that it has; a lost answer is repeated.
            count: Most batches of an answer.
            idle: The worker has no batch. It leaves the rounds until there is one or the end.
            now: The time.
            first_open: The first loop that the worker has not left; None: this one.
        """
        member = self.member(worker, now)
        if not self.all_here():
            return None
        self._resumed = False  # this worker was a member before the restart of the servers
        units = self.units(spec)
        loop = self.ledger.open(
            worker, spec, first_open, [member.worker for member in self.membership.registered()]
        )
        if loop.ended:
            return _end(member)
        if loop.is_late(worker, received):
            return BatchesReply()
        loop.units = units
        # backup workers must not collect batches
        at_once = self.policy.barrier and not self.policy.backup
        # workers that wait in an earlier loop come to this one only after its end
        there = [
            m.worker
            for m in self.membership.registered()
            if m.waiting is None or m.waiting >= spec.loop
        ]
        together = there if at_once else [worker]
        numbers = loop.take(
            worker, received, count, together if worker in together else [*together, worker]
        )
        self._wake_receivers(loop, worker if numbers else None)
        if numbers or not idle:
            return BatchesReply(tuple(numbers), following=tuple(loop.following(worker, numbers)))
        # the script keeps a rest that is too small to push, or pushes it after the loop
        if loop.holds(worker):
            return _end(member)
        member.waiting = spec.loop
        if member.state is WorkerState.ACTIVE:
            member.state = WorkerState.IDLE
            member.step_timer.discard()
        self.end_loops()
        self.advance(now)
        return _end(member) if loop.ended else None

    def _wake_receivers(self, loop: LoopLedger, served: int | None) -> None:
        """Wake the worker that got batches now, and those for which batches wait in the loop."""
        for other in self.membership.registered():
            waits_for_it = other.waiting == loop.spec.loop and loop.has_dealt(other.worker)
            if other.worker == served or waits_for_it:
                self.wake(other)

    def waits(self, worker: int, spec: Spec) -> tuple[Any, ...] | None:
        """Return all state that a repeated request for data can change; None for a first one."""
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
        """Return the number of batches of an update; None: one of each worker."""
        return units_of(self.rules.global_batch, spec) if self.policy.barrier else None

    def return_batches(
        self, worker: int, batches: Iterable[BatchKey], now: float, used: bool = False
    ) -> None:
        """Return batches that will not be pushed; used ones are committed, others are free."""
        self.member(worker, now)
        if not used:
            self.ledger.put_back(worker, batches)
            return
        self.ledger.use_up(worker, batches)
        self.end_loops()
        self.advance(now)

    def report_metrics(self, worker: int, metrics: dict[str, float], now: float) -> None:
        """Store values without a history. Only logs of earlier releases have this command."""
        member = self.member(worker, now)
        for name, value in metrics.items():
            self.reported.take_latest(member, name, value)

    def follows(self, shard: int, now: float) -> None:
        """Note that a shard follows the current log."""
        self.followers.add(shard)

    # ---- snapshots -------------------------------------------------------------------------------

    def cut(self, now: float) -> bool:
        """Append a Cut of the current version. Return False while another snapshot is written."""
        if not self.begun or self.cuts.busy or (self.move is not None and not self.move.complete):
            return False
        self.log.append(Cut(self.log.next, self.version))
        self.cuts.begin(self.version, self.log.index, now, {})
        assert self.cuts.cutting is not None
        self.cuts.cutting.state = self.state()
        return True

    def state(self) -> dict[str, Any]:
        """Return all decisions as JSON values. Reports of shards and workers are not included."""
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
        """Return `state` with the entries that some shard may need, for `become`."""
        return self.state() | {
            "begun": self.begun,
            "uploader": self._uploader,
            "log": self.log.state(),
            "cut": self.cuts.parts(),
        }

    @property
    def expected(self) -> int:
        """Number of workers that would join again after a rollback."""
        return len(self.membership.registered()) if self.started else self.min_workers

    def policy_args(self) -> tuple[str, int | None, int | None, int]:
        """Return the arguments of `policy` for the current row."""
        row = self.policy
        return row.name, row.bound if row.name == "ssp" else None, row.max_staleness, row.backup

    def restore(
        self,
        state: Mapping[str, Any],
        model: ModelSpec,
        now: float,
        before: "CoordinatorMachine | None" = None,
    ) -> None:
        """Continue from a snapshot. All workers join as new, and uncommitted batches are free.

        Args:
            state: The coordinator's state in the snapshot.
            model: The model.
            now: The time.
            before: The coordinator before a rollback: its policy stays, and no more workers than
                its own are expected. None: the job was not running; the snapshot's policy stays
                unless the settings name another one than then.
        """
        self._take_numbers(state, model)
        self._resumed = True
        expected = before.expected if before is not None else self.min_workers
        # where all workers had left, as at the end of a run, a new run begins
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
        """Load the state of `whole`.

        Args:
            whole: The state.
            model: The model.
            now: The time.
            snapshot: Index of the newest snapshot's Cut; a reshard before it is complete.
        """
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
        """Continue in a new process after a replay. Leases begin now; a snapshot is abandoned.

        The log may lack its newest commands, and with them workers that joined: their numbers
        are not given again. If all workers had left, the next ones wait for --min-workers.

        Args:
            now: The time.
            generation: Number of this start of the servers.
            resumes: The next worker may begin another run, and change what a resumed job allows.
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
    """Return the end of the loop and note that the worker was told."""
    member.ended = True
    return BatchesReply(end=True)
