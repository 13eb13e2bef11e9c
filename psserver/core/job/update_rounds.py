"""Update rounds: which pushes make the next update, and which are refused.

Theory of operation. This is the part of the coordinator (coordinator.py) that appends entries.

States of a push: reported by some shards, ready (reported by all), decided. A decision is an
Apply, a Reject, or the Evict of its worker.

Events: a report of a shard, a departure of a worker, a change of policy, a finished snapshot.
After each event `advance` appends every update that the policy allows.

Invariants:

- Only ready pushes are applied. A worker's pushes are decided in their order; a push makes the
  undecided ones before it stale.
- A push is forgotten in the step that decides it, so no later step can count it again.
- A snapshot that is due at a version comes before the next update.
- No update is appended during a reshard, before --min-workers have registered, or after a failure.

The rounds are bulk-synchronous (Valiant, 1990), stale-synchronous (Ho et al., 2013) or
asynchronous: policy.py has the rules and the papers.
"""

from collections.abc import Iterable

from pscommon.core.errors import QUARANTINED, NonFiniteError, PSError
from pscommon.core.log_entries import (
    Apply,
    Begin,
    Contribution,
    Entry,
    Evict,
    Measure,
    PushKey,
    Reject,
    ShardReport,
    Staged,
)
from pscommon.core.model_spec import ModelSpec
from psserver.core.data.data_ledger import DataLedger
from psserver.core.job.entry_log import EntryLog
from psserver.core.job.pending_pushes import PendingPushes
from psserver.core.job.policy import choose
from psserver.core.job.reshard_phase import ReshardPhase
from psserver.core.job.settings import JobRules
from psserver.core.job.snapshot_schedule import SnapshotSchedule
from psserver.core.shard.clipping import Measurement, clip_factor
from psserver.core.shard.state_machine import GIVEN_UP
from psserver.core.workers.members import Member, WorkerState
from psserver.core.workers.membership import Membership


class UpdateRounds:
    """The machine; the text of the module describes it.

    Attributes:
        shards: Number of shards.
        epoch: Id of this log; reports on another log are ignored.
        version: Number of updates.
        failure: Why the job has to end.
        move: The reshard in progress.
        layout_index: Index of the newest Reshard.

    The argument `generation` counts the starts of the job's servers: no worker number is given
    twice.
    """

    def __init__(
        self, shards: int, rules: JobRules, generation: int = 0, epoch: int | None = None
    ) -> None:
        self.shards = shards
        self.rules = rules
        self.epoch = generation if epoch is None else epoch
        self.policy = rules.policy
        self.min_workers = rules.min_workers
        self.membership = Membership(rules.lease, generation)
        self.membership.progress_timeout = rules.progress_timeout
        self.ledger = DataLedger()
        self.log = EntryLog(shards)
        self.pending = PendingPushes(shards)
        self.cuts = SnapshotSchedule(rules.every, shards)
        self.move: ReshardPhase | None = None
        self.layout_index = 0
        self.model: ModelSpec | None = None
        self.failure: PSError | None = None
        self.begun = False
        self.started = False
        self.version = 0
        self.samples = 0
        self.counts = {"applied": 0, "stale": 0, "rejected": 0}
        self.evicted: set[int] = set()
        self._uploader: int | None = None

    def report(self, report: ShardReport, now: float) -> None:
        """Process a shard's report. A report on another log is ignored."""
        if report.epoch != self.epoch:
            return
        self.reached(report)
        for staged in report.staged if self._is_of_layout(report) else ():
            self._staged(report, staged, now)
        if self.pending.measurement is not None and self._is_of_layout(report):
            self.pending.measurement.take(report)
        self.advance(now)

    def reached(self, report: ShardReport) -> None:
        """Note how far a shard is, and drop entries that every shard has carried out."""
        if report.epoch == self.epoch:
            self.log.reached(report.shard, report.index)

    def news(self, report: ShardReport) -> list[Staged]:
        """Return the pushes that a shard has not reported before."""
        if report.epoch != self.epoch or not self._is_of_layout(report):
            return []
        return [staged for staged in report.staged if self._is_news(report.shard, staged)]

    def has_measured(self, report: ShardReport) -> bool:
        """Return whether a report has a new answer to the current Measure."""
        measurement = self.pending.measurement
        if measurement is None or report.epoch != self.epoch or not self._is_of_layout(report):
            return False
        return measurement.is_answered_by(report)

    def _is_of_layout(self, report: ShardReport) -> bool:
        """Return whether a report's pushes have the current partition."""
        return report.shard < self.shards and report.index >= self.layout_index

    def _is_news(self, shard: int, staged: Staged) -> bool:
        member = self.membership.members.get(staged.key.worker)
        decided = (
            member is not None and member.is_current and staged.key.seq <= member.seq and self.begun
        )
        return not decided and not self.pending.holds(shard, staged.key)

    def is_undecided(self, key: PushKey) -> bool:
        """Return whether this is a push of a member that nothing has been decided on."""
        member = self.membership.members.get(key.worker)
        return member is not None and member.is_current and key.seq > member.seq

    def refuse_push(self, worker: int, seq: int, reason: str, detail: str, now: float) -> None:
        """Reject a push that cannot be applied. Its batches stay leased: its worker may return
        them.
        """
        if self.is_undecided(key := PushKey(worker, seq)):
            self._reject(key, reason, f"push {seq} of worker {worker} refused: {detail}")
            self.advance(now)

    def shard_lost(self, shard: int) -> None:
        """Drop what a shard had reported: its process is new and there are no weights yet."""
        self.pending.shard_lost(shard)

    @property
    def uploader(self) -> Member | None:
        """The worker that uploads the initial weights."""
        return self.membership.members.get(self._uploader or 0)

    @property
    def ready_workers(self) -> set[int]:
        """Workers with an undecided push that all shards have."""
        return {key.worker for key in self.pending.ready}

    def _staged(self, report: ShardReport, staged: Staged, now: float) -> None:
        key = staged.key
        member = self.membership.members.get(key.worker)
        if member is None or not member.is_current:
            return self._fence_stranger(key.worker, report.index)
        if key.seq <= member.seq and not (key.seq == 0 and not self.begun):
            return None
        if staged.problem and self.move is not None:
            return None  # the shard reports it again
        if staged.problem:
            reason, _, detail = staged.problem.partition(": ")
            return self._bad(staged, reason, f"{member}: {detail}", now)
        self.pending.staged(report.shard, staged)
        if key in self.pending.ready:
            member.step_timer.end(now)
        return None

    def _fence_stranger(self, worker: int, index: int) -> None:
        """Evict the unknown worker of a reported push, so that the shards drop the push.

        Args:
            worker: The worker.
            index: Number of entries that the shard has carried out. A shard that has carried out
                all of them and still has the push has forgotten the earlier Evict.
        """
        if worker not in self.evicted or index >= self.log.index:
            self._evict(worker, "it is not a worker of this job any more")

    def forget_departed(self, keep: int, now: float) -> None:
        """Forget all but the newest departed members. A push of a forgotten one evicts it again."""
        self.membership.forget_departed(keep)
        self.evicted &= self.membership.members.keys()

    def _evict(self, worker: int, reason: str) -> None:
        self.evicted.add(worker)
        self.log.append(Evict(self.log.next, worker, reason))

    def advance(self, now: float) -> None:
        """Append all updates that can be decided now.

        A snapshot that is due at this version comes first. A failed job gets no update.
        """
        self._begin_if_uploaded(now)
        if not self.begun or self.move is not None or not self.all_here():
            return
        self._reject_unfit(now)
        while self.failure is None and not self.cuts.due_at(self.version):
            keys = choose(self.policy, self.membership.clocks(), self._oldest_ready())
            if not keys or not self._apply(keys, now):
                return

    def _begin_if_uploaded(self, now: float) -> None:
        if (
            not self.begun
            and self._uploader is not None
            and PushKey(self._uploader, 0) in self.pending.ready
        ):
            self._forget(PushKey(self._uploader, 0))
            self.log.append(Begin(self.log.next, self._uploader))
            self.begun = True
            self.cuts.started(0, now)

    def all_here(self) -> bool:
        """Return whether training has started: the first round waits for --min-workers."""
        self.started = self.started or (
            self.begun and len(self.membership.registered()) >= self.min_workers
        )
        return self.started

    def _oldest_ready(self) -> dict[int, PushKey]:
        """Return each active worker's oldest ready push, in order of arrival.

        An idle worker with a ready push becomes active.
        """
        oldest: dict[int, PushKey] = {}
        for key in self.pending.ready:
            member = self.membership.members[key.worker]
            if member.state is WorkerState.IDLE:
                self.wake(member)
            if member.state is WorkerState.ACTIVE and (
                key.worker not in oldest or key.seq < oldest[key.worker].seq
            ):
                oldest[key.worker] = key
        return oldest

    def _reject_unfit(self, now: float) -> None:
        """Reject pushes that are too old, too large or superseded."""
        for key in self.pending.given_up():
            self._reject(key, "STALE", GIVEN_UP)
        limit = 0 if self.policy.backup else self.policy.max_staleness
        for key, staged in list(self.pending.ready.items()):
            if key not in self.pending.ready:
                continue  # its worker was evicted for an earlier push
            behind = self.version - staged.base
            if limit is not None and behind > limit:
                self._reject(key, "STALE", f"computed from version {staged.base}, {behind} ago")
                self._drop(staged if self.policy.backup and self.rules.late == "drop" else None)
            elif self.rules.max_norm and self.rules.bad_gradients != "clip":
                norm = self.pending.norm(key)
                if not norm <= self.rules.max_norm:
                    member = self.membership.members[key.worker]
                    self._bad(
                        staged, "OUTLIER", f"{member}: its gradient's norm is {norm:.6g}", now
                    )

    def _apply(self, keys: Iterable[PushKey], now: float) -> bool:
        """Append the update of these pushes. Return False if the shards measure it first."""
        pushes = [self.pending.ready[key] for key in keys]
        contributions = tuple(
            Contribution(p.key, p.samples, p.base, self._scale(p.key)) for p in pushes
        )
        clips = self.model is not None and self.model.optimizer.clip_norm is not None
        clipped = self._clipped(contributions) if clips else contributions
        if clipped is None:
            return False
        self.version += 1
        self.pending.measurement = None
        self.log.append(Apply(self.log.next, self.version, clipped))
        for push in pushes:  # before the counting below, which may append further updates
            self._forget(push.key)
        for push, contribution in zip(pushes, contributions, strict=True):
            self._count(push, bad=contribution.scale < 1.0 or bool(push.mended), now=now)
        self._reject_unfit(now)
        return True

    def _clipped(self, contributions: tuple[Contribution, ...]) -> tuple[Contribution, ...] | None:
        """Return the contributions scaled to the clip norm; None: the norm is not known yet."""
        clip_norm = self.model.optimizer.clip_norm if self.model is not None else None
        if clip_norm is None:
            return contributions
        square_norm = self._square_norm(contributions)
        if square_norm is None:
            return None
        factor = clip_factor(clip_norm, square_norm)
        return tuple(each._replace(scale=each.scale * factor) for each in contributions)

    def _square_norm(self, contributions: tuple[Contribution, ...]) -> float | None:
        """Return the squared norm of the average; None: a Measure was appended."""
        first = contributions[0]
        if len(contributions) == 1 and self.pending.is_measured(first.key):
            return self.pending.square_norm(first.key) * first.scale**2
        if (
            self.pending.measurement is None
            or self.pending.measurement.contributions != contributions
        ):
            self.pending.measurement = Measurement(self.log.next, contributions)
            self.log.append(Measure(self.log.next, contributions))
        return self.pending.measurement.square_norm(self.shards)

    def _scale(self, key: PushKey) -> float:
        """Return the factor that limits a gradient's norm to max_norm, at most 1."""
        if not self.rules.max_norm or self.rules.bad_gradients != "clip":
            return 1.0
        return min(1.0, self.rules.max_norm / max(self.pending.norm(key), 1e-300))

    def _count(self, push: Staged, bad: bool, now: float) -> None:
        member = self.membership.members[push.key.worker]
        member.clock += 1
        member.steps += 1
        member.step_timer.begin(now)
        self.samples += push.samples
        self.counts["applied"] += 1
        self.ledger.commit(push.key.worker, push.batches)
        self._judge(member, bad, "its gradients had to be clipped", now)
        self.end_loops()

    def _bad(self, push: Staged, reason: str, detail: str, now: float) -> None:
        """Reject a bad gradient, and commit its batches so that they are not dealt again."""
        member = self.membership.members[push.key.worker]
        self._reject(push.key, reason, detail)
        if push.key.seq == 0:
            return None  # initial weights; another worker's may be better
        if self.rules.bad_gradients == "abort":
            return self.fail(NonFiniteError(f"{detail} (--bad-gradients abort)", reason))
        self._drop(push)
        return self._judge(member, True, detail, now)

    def _judge(self, member: Member, bad: bool, detail: str, now: float) -> None:
        """Quarantine a worker after several bad gradients in a row."""
        member.bad = member.bad + 1 if bad else 0
        limit = self.rules.quarantine_after
        if limit is not None and member.bad >= limit and member.is_current:
            text = f"{QUARANTINED} after {member.bad} bad gradients in a row, the last: {detail}"
            self.remove(member, WorkerState.LOST, text, now)

    def _drop(self, push: Staged | None) -> None:
        """Commit the batches of a push that will not count, so that they are not dealt again."""
        if push is not None:
            self.ledger.drop(push.key.worker, push.batches)
            self.end_loops()

    def _reject(self, key: PushKey, reason: str, detail: str) -> None:
        self.log.append(Reject(self.log.next, key, reason, detail))
        self.counts["stale" if reason == "STALE" else "rejected"] += 1
        self._forget(key)

    def _forget(self, key: PushKey) -> None:
        member = self.membership.members[key.worker]
        member.seq = max(member.seq, key.seq)
        self.pending.forget(key)

    def entries_after(self, index: int) -> list[Entry]:
        """Return the entries that a shard needs after `index`."""
        return self.log.after(index)

    def remove(self, member: Member, state: WorkerState, reason: str, now: float) -> None:
        self.membership.remove(member, state, reason)
        self.ledger.give_back(member.worker)
        self.pending.drop(member.worker)
        if self._uploader == member.worker and not self.begun:
            self.model = self._uploader = None
        self._evict(member.worker, reason or "it left the job")
        self.end_loops()
        self.advance(now)

    def wake(self, member: Member) -> None:
        member.waiting = None
        if member.state is WorkerState.IDLE:
            self.membership.activate(member)

    def end_loops(self) -> None:
        """End loops of which every batch has counted, and activate the workers that waited.

        A loop ends for all workers at once: until then a lost worker's batches may be dealt
        again. A worker without a part in an update (--global-batch) is active for the next one.
        """
        for number in {m.waiting for m in self.membership.current() if m.waiting is not None}:
            loop = self.ledger.loops[number]
            if loop.done:
                loop.end()
            for member in self.membership.current():
                if member.waiting == number and (loop.ended or loop.has_dealt(member.worker)):
                    self.wake(member)

    def fail(self, error: PSError) -> None:
        self.failure = self.failure or error
