"""Update rounds: which pushes make the next update, and which are refused.

Theory of operation. This part of the coordinator (machine.py) appends the entries of pushes.

States of a push: reported by some shards, ready (reported by all), decided. A decision is an
Apply, a Reject, the Evict of its worker, or for a push of buffers only a SetBuffers.

Events: a report of a shard, a departure of a worker, a change of policy, a finished snapshot.
After each event `advance` appends every update that the policy allows.

Invariants:

- A push of buffers only never enters a round: it is decided as soon as it is ready.
- Only ready pushes are applied. A worker's pushes are decided in their order; a push makes the
  undecided ones before it stale.
- A push is forgotten in the step that decides it, so no later step can count it again.
- A snapshot that is due at a version comes before the next round.
- A round makes one update for each optimizer that its pushes name, and counts all of them. If
  some of its pushes begin a batch and others do not, it takes the others only.
- No update is appended during a reshard, before --min-workers have registered, or after a failure.

The rounds are bulk-synchronous (Valiant, 1990), stale-synchronous (Ho et al., 2013) or
asynchronous: policy.py has the rules and the papers.
"""

import math
from collections.abc import Iterable, Sequence
from operator import itemgetter

from pscommon.core.errors import QUARANTINED, NonFiniteError
from pscommon.core.limits import ALLREDUCE
from pscommon.core.log_entries import (
    Apply,
    Begin,
    Contribution,
    Measure,
    PushKey,
    Reject,
    SetBuffers,
    Staged,
    clip_factor,
)
from psserver.core.coordinator.participation import Participation
from psserver.core.job.clipping import Measurement
from psserver.core.job.job_state import JobState
from psserver.core.job.policy import is_bounded
from psserver.core.job.ready_pushes import WaitingPush, WaitingPushes
from psserver.core.shard.state_machine import GIVEN_UP
from psserver.core.workers.members import Member, WorkerState

MAX_DELAY_VERSIONS = 100
"""Versions for which a push waits for workers that are within a batch."""


class UpdateRounds:
    """Decides on the pushes of a job; the text of the module describes it."""

    def __init__(self, job: JobState, participation: Participation) -> None:
        self._job = job
        self._participation = participation
        self._waiting = WaitingPushes()

    def advance(self, now: float) -> None:
        """Append all updates that can be decided now.

        A snapshot that is due at this version comes first. A failed job gets no update.
        """
        job = self._job
        if not job.begun:
            self._begin_if_uploaded(now)
        if not job.begun or job.reshard is not None or not job.has_started():
            return
        self._reject_unfit(now)
        while job.pending.ready and job.failure is None and not job.waits_for_cut:
            self._wake_pushing_workers()
            keys = self._of_begun_batches(self._choose())
            if not keys or not self._apply(keys, now):
                return

    def _begin_if_uploaded(self, now: float) -> None:
        job = self._job
        if job.uploading_worker is None:
            return
        if (key := PushKey(job.uploading_worker, 0)) in job.pending.ready:
            self._forget(key)
            job.log.append(Begin(job.log.next, job.uploading_worker))
            job.begun = True
            job.cuts.started(0, now)

    def _wake_pushing_workers(self) -> None:
        """Let idle workers with a ready push take part, and note what may be chosen now."""
        job, ready = self._job, self._job.pending.ready
        members, changed = job.membership.members, job.membership.index.changed
        found = [
            (arrival, members[worker])
            for worker in {*changed, *ready.changed}
            if (arrival := ready.arrival(worker)) is not None
        ]
        changed.clear()
        ready.changed.clear()
        for arrival, member in sorted(found, key=itemgetter(0)):
            if member.state is WorkerState.IDLE:
                self._participation.wake(member)
            if member.state is WorkerState.ACTIVE and is_bounded(job.policy):
                self._waiting.add(WaitingPush(member.clock, arrival, member.worker))

    def _choose(self) -> Sequence[PushKey]:
        """Return the pushes that make the next update, in the order in which they are summed.

        An empty result means that more pushes are needed.
        """
        job, ready, policy = self._job, self._job.pending.ready, self._job.policy
        if policy.name == ALLREDUCE:
            workers = job.reduction.open.workers if job.reduction.open.kind == "gradients" else ()
            is_complete = all(worker in ready.by_worker for worker in workers)
            return [ready.oldest(worker) for worker in workers] if is_complete else ()
        if policy.barrier:
            enough = max(1, job.membership.index.active_clocks.count - policy.backup)
            if len(ready.by_worker) < enough:
                return ()
            active = [m.worker for m in job.membership.active()]
            keys = [ready.oldest(worker) for worker in active if worker in ready.by_worker]
            return keys if len(keys) >= enough else ()
        if policy.bound is None:
            members = job.membership.members
            for key in ready:
                if members[key.worker].state is WorkerState.ACTIVE:
                    return [ready.oldest(key.worker)]
            return ()
        smallest = job.membership.index.active_clocks.value
        if smallest is None:
            return ()
        first = self._waiting.first(smallest + policy.bound - 1, self._is_waiting)
        return [ready.oldest(first.worker)] if first is not None else ()

    def _is_waiting(self, push: WaitingPush) -> bool:
        member = self._job.membership.members.get(push.worker)
        return (
            member is not None
            and member.state is WorkerState.ACTIVE
            and member.clock == push.clock
            and self._job.pending.ready.arrival(push.worker) == push.arrival
        )

    def _of_begun_batches(self, keys: Sequence[PushKey]) -> Sequence[PushKey]:
        """Leave out pushes that begin a batch while other workers are within one.

        Workers that step several optimizers in turn may be out of step, for example because one has
        joined. Each update would then average the gradients of some workers only. A push that
        commits batches begins one. The delay ends if a worker never commits any.
        """
        job = self._job
        if not job.policy.barrier or job.has_one_optimizer or job.policy.age_limit is not None:
            return keys
        ready = job.pending.ready
        within = [key for key in keys if not ready[key].batches]
        oldest = min((ready[key].base for key in keys), default=job.version)
        return within if within and job.version - oldest < MAX_DELAY_VERSIONS else keys

    def _reject_unfit(self, now: float) -> None:
        """Reject pushes that are too old, too large or superseded."""
        job = self._job
        for key in job.pending.given_up():
            self.reject(key, "STALE", GIVEN_UP)
        ready = job.pending.ready
        if not ready:
            return
        limit, new = job.policy.age_limit, [*ready.arrived]
        ready.arrived.clear()
        oldest = ready.oldest_base if limit is not None else None
        is_any_stale = limit is not None and oldest is not None and job.version - oldest > limit
        # other pushes were checked when they arrived
        is_any_void = job.policy.name == ALLREDUCE
        for key in [*ready] if is_any_stale or is_any_void else new:
            if (staged := ready.get(key)) is None:
                continue  # its worker was evicted for an earlier push
            behind = job.version - staged.base
            if not staged.samples:
                self._set_buffers(staged)
            elif problem := self._reduce_problem(staged):
                self.reject(key, "STALE", problem)
            elif limit is not None and behind > limit:
                self.reject(key, "STALE", f"computed from version {staged.base}, {behind} ago")
                if job.policy.backup and job.rules.late == "drop":
                    self._drop(staged)
            elif job.rules.max_norm and job.rules.bad_gradients != "clip":
                norm = job.pending.norm(key)
                if not norm <= job.rules.max_norm:
                    member = job.membership.members[key.worker]
                    self.reject_bad(
                        staged, "OUTLIER", f"{member}: its gradient's norm is {norm:.6g}", now
                    )

    def _reduce_problem(self, push: Staged) -> str:
        """Return why a push is not of the open reduce round; empty if it is (policy allreduce)."""
        now_open = self._job.reduction.open
        if self._job.policy.name != ALLREDUCE:
            return "the job's policy has no reduce rounds" if push.reduce_round else ""
        request = now_open.request_of(push.key.worker)
        if now_open.kind != "gradients" or push.reduce_round != now_open.number or request is None:
            return f"its reduce round {push.reduce_round} is void"
        return "" if push.samples == request.samples else "its samples are not those of its round"

    def _set_buffers(self, push: Staged) -> None:
        """Take buffers of the current version; those of an older one have been replaced.

        Under policy allreduce they come with the weights, in an upload.
        """
        job = self._job
        if push.upload != (job.policy.name == ALLREDUCE):
            self.reject(push.key, "STALE", f"policy {job.policy.name} has no such push")
        elif push.base != job.version:
            self.reject(push.key, "STALE", f"its buffers are of version {push.base}")
        else:
            job.log.append(SetBuffers(job.log.next, push.key))
            self._forget(push.key)
            if push.upload:
                job.reduction.uploaded = job.version

    def _apply(self, keys: Iterable[PushKey], now: float) -> bool:
        """Append the update of these pushes, one for each optimizer.

        Return False if the shards measure an update first.
        """
        job, updates = self._job, self._updates(keys)
        clipped = {}
        for optimizer, contributions in updates.items():
            scaled = self._clipped(optimizer, contributions)
            if scaled is None:
                return False
            clipped[optimizer] = scaled
        pushes = [
            (job.pending.ready[part.key], part.scale < 1.0)
            for contributions in updates.values()
            for part in contributions
        ]
        job.pending.forget_measurements()
        for optimizer, contributions in clipped.items():
            job.count_update(optimizer)
            job.log.append(Apply(job.log.next, job.version, contributions))
            for part in contributions:
                job.membership.members[part.key.worker].staleness = job.version - 1 - part.base
        job.reduction.applied(job.version)
        for push, _ in pushes:  # before the counting below, which may append further updates
            self._forget(push.key)
        for push, is_scaled in pushes:
            self._count(push, bad=is_scaled or bool(push.mended), now=now)
        self._reject_unfit(now)
        return True

    def _updates(self, keys: Iterable[PushKey]) -> dict[str, tuple[Contribution, ...]]:
        """Return the contributions to each optimizer's update, by its name."""
        updates: dict[str, list[Contribution]] = {}
        for key in keys:
            push = self._job.pending.ready[key]
            part = Contribution(key, push.samples, push.base, self._scale(key))
            updates.setdefault(push.optimizer, []).append(part)
        return {optimizer: tuple(parts) for optimizer, parts in updates.items()}

    def _clipped(
        self, optimizer: str, contributions: tuple[Contribution, ...]
    ) -> tuple[Contribution, ...] | None:
        """Return the contributions scaled to the clip norm; None: the norm is not known yet."""
        job, clip_norm = self._job, self._job.clip_norm(optimizer)
        if job.policy.name == ALLREDUCE:
            return contributions  # the workers have clipped their sum
        if clip_norm is None:
            if job.rules.max_norm:
                norms = (job.pending.norm(part.key) for part in contributions)
                job.gradient_norms[optimizer] = max(norms)
            return contributions
        square_norm = self._square_norm(contributions)
        if square_norm is None:
            return None
        job.gradient_norms[optimizer] = math.sqrt(square_norm)
        factor = clip_factor(clip_norm, square_norm)
        return tuple(each._replace(scale=each.scale * factor) for each in contributions)

    def _square_norm(self, contributions: tuple[Contribution, ...]) -> float | None:
        """Return the squared norm of the average; None: a Measure was appended."""
        job = self._job
        first = contributions[0]
        if len(contributions) == 1 and job.pending.is_measured(first.key):
            return job.pending.square_norm(first.key) * first.scale**2
        measurement = job.pending.measurement_of(contributions)
        if measurement is None:
            measurement = Measurement(job.log.next, contributions)
            job.pending.measure(measurement)
            job.log.append(Measure(job.log.next, contributions))
        return measurement.square_norm(job.shards)

    def _scale(self, key: PushKey) -> float:
        """Return the factor that limits a gradient's norm to max_norm, at most 1."""
        job = self._job
        if not job.rules.max_norm or job.rules.bad_gradients != "clip":
            return 1.0
        return min(1.0, job.rules.max_norm / max(job.pending.norm(key), 1e-300))

    def _count(self, push: Staged, bad: bool, now: float) -> None:
        job = self._job
        member = job.membership.members[push.key.worker]
        job.membership.index.set_clock(member, member.clock + 1)
        member.steps += 1
        member.step_timer.begin(now)
        if job.counts_samples(push.optimizer):
            job.samples += push.samples
        job.counts["applied"] += 1
        job.ledger.commit(push.key.worker, push.batches)
        self._judge(member, bad, "its gradients had to be clipped", now)
        self._participation.end_loops()

    def reject_bad(self, push: Staged, reason: str, detail: str, now: float) -> None:
        """Reject a bad gradient, and commit its batches so that they are not dealt again."""
        job = self._job
        member = job.membership.members[push.key.worker]
        self.reject(push.key, reason, detail)
        if push.key.seq == 0:
            return None  # initial weights; another worker's may be better
        if job.rules.bad_gradients == "abort":
            return job.fail(NonFiniteError(f"{detail} (--bad-gradients abort)", reason))
        self._drop(push)
        return self._judge(member, True, detail, now)

    def _judge(self, member: Member, bad: bool, detail: str, now: float) -> None:
        """Quarantine a worker after several bad gradients in a row."""
        member.bad = member.bad + 1 if bad else 0
        limit = self._job.rules.quarantine_after
        if limit is not None and member.bad >= limit and member.is_current:
            text = f"{QUARANTINED} after {member.bad} bad gradients in a row, the last: {detail}"
            self.remove(member, WorkerState.LOST, text, now)

    def _drop(self, push: Staged) -> None:
        """Commit the batches of a push that will not count, so that they are not dealt again."""
        self._job.ledger.drop(push.key.worker, push.batches)
        self._participation.end_loops()

    def reject(self, key: PushKey, reason: str, detail: str) -> None:
        job = self._job
        job.log.append(Reject(job.log.next, key, reason, detail))
        job.counts["stale" if reason == "STALE" else "rejected"] += 1
        self._forget(key)

    def _forget(self, key: PushKey) -> None:
        member = self._job.membership.members[key.worker]
        member.seq = max(member.seq, key.seq)
        self._job.pending.forget(key)

    def remove(self, member: Member, state: WorkerState, reason: str, now: float) -> None:
        """Remove a member and append the updates that waited for it."""
        self._participation.remove(member, state, reason)
        self.advance(now)
