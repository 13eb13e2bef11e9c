"""Update rounds: which pushes make the next update, and which are refused.

Theory of operation. This part of the coordinator (machine.py) appends the entries of pushes.

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

from pscommon.core.errors import QUARANTINED, NonFiniteError
from pscommon.core.log_entries import Apply, Begin, Contribution, Measure, PushKey, Reject, Staged
from psserver.core.coordinator.participation import Participation
from psserver.core.job.clipping import Measurement, clip_factor
from psserver.core.job.job_state import JobState
from psserver.core.job.policy import choose
from psserver.core.shard.state_machine import GIVEN_UP
from psserver.core.workers.members import Member, WorkerState


class UpdateRounds:
    """Decides on the pushes of a job; the text of the module describes it."""

    def __init__(self, job: JobState, participation: Participation) -> None:
        self._job = job
        self._participation = participation

    def advance(self, now: float) -> None:
        """Append all updates that can be decided now.

        A snapshot that is due at this version comes first. A failed job gets no update.
        """
        self._begin_if_uploaded(now)
        job = self._job
        if not job.begun or job.reshard is not None or not job.has_started():
            return
        self._reject_unfit(now)
        while job.failure is None and not job.cuts.due_at(job.version):
            keys = choose(job.policy, job.membership.clocks(), self._oldest_ready())
            if not keys or not self._apply(keys, now):
                return

    def _begin_if_uploaded(self, now: float) -> None:
        job = self._job
        if job.begun or job.uploading_worker is None:
            return
        if (key := PushKey(job.uploading_worker, 0)) in job.pending.ready:
            self._forget(key)
            job.log.append(Begin(job.log.next, job.uploading_worker))
            job.begun = True
            job.cuts.started(0, now)

    def _oldest_ready(self) -> dict[int, PushKey]:
        """Return each active worker's oldest ready push, in order of arrival.

        An idle worker with a ready push becomes active.
        """
        oldest: dict[int, PushKey] = {}
        for key in self._job.pending.ready:
            member = self._job.membership.members[key.worker]
            if member.state is WorkerState.IDLE:
                self._participation.wake(member)
            if member.state is WorkerState.ACTIVE and (
                key.worker not in oldest or key.seq < oldest[key.worker].seq
            ):
                oldest[key.worker] = key
        return oldest

    def _reject_unfit(self, now: float) -> None:
        """Reject pushes that are too old, too large or superseded."""
        job = self._job
        for key in job.pending.given_up():
            self.reject(key, "STALE", GIVEN_UP)
        limit = 0 if job.policy.backup else job.policy.max_staleness
        for key, staged in list(job.pending.ready.items()):
            if key not in job.pending.ready:
                continue  # its worker was evicted for an earlier push
            behind = job.version - staged.base
            if limit is not None and behind > limit:
                self.reject(key, "STALE", f"computed from version {staged.base}, {behind} ago")
                self._drop(staged if job.policy.backup and job.rules.late == "drop" else None)
            elif job.rules.max_norm and job.rules.bad_gradients != "clip":
                norm = job.pending.norm(key)
                if not norm <= job.rules.max_norm:
                    member = job.membership.members[key.worker]
                    self.reject_bad(
                        staged, "OUTLIER", f"{member}: its gradient's norm is {norm:.6g}", now
                    )

    def _apply(self, keys: Iterable[PushKey], now: float) -> bool:
        """Append the update of these pushes. Return False if the shards measure it first."""
        job = self._job
        pushes = [job.pending.ready[key] for key in keys]
        contributions = tuple(
            Contribution(p.key, p.samples, p.base, self._scale(p.key)) for p in pushes
        )
        clips = job.model is not None and job.model.optimizer.clip_norm is not None
        clipped = self._clipped(contributions) if clips else contributions
        if clipped is None:
            return False
        job.version += 1
        job.pending.measurement = None
        job.log.append(Apply(job.log.next, job.version, clipped))
        for push in pushes:  # before the counting below, which may append further updates
            self._forget(push.key)
        for push, contribution in zip(pushes, contributions, strict=True):
            self._count(push, bad=contribution.scale < 1.0 or bool(push.mended), now=now)
        self._reject_unfit(now)
        return True

    def _clipped(self, contributions: tuple[Contribution, ...]) -> tuple[Contribution, ...] | None:
        """Return the contributions scaled to the clip norm; None: the norm is not known yet."""
        clip_norm = self._job.model.optimizer.clip_norm if self._job.model is not None else None
        if clip_norm is None:
            return contributions
        square_norm = self._square_norm(contributions)
        if square_norm is None:
            return None
        factor = clip_factor(clip_norm, square_norm)
        return tuple(each._replace(scale=each.scale * factor) for each in contributions)

    def _square_norm(self, contributions: tuple[Contribution, ...]) -> float | None:
        """Return the squared norm of the average; None: a Measure was appended."""
        job = self._job
        first = contributions[0]
        if len(contributions) == 1 and job.pending.is_measured(first.key):
            return job.pending.square_norm(first.key) * first.scale**2
        if (
            job.pending.measurement is None
            or job.pending.measurement.contributions != contributions
        ):
            job.pending.measurement = Measurement(job.log.next, contributions)
            job.log.append(Measure(job.log.next, contributions))
        return job.pending.measurement.square_norm(job.shards)

    def _scale(self, key: PushKey) -> float:
        """Return the factor that limits a gradient's norm to max_norm, at most 1."""
        job = self._job
        if not job.rules.max_norm or job.rules.bad_gradients != "clip":
            return 1.0
        return min(1.0, job.rules.max_norm / max(job.pending.norm(key), 1e-300))

    def _count(self, push: Staged, bad: bool, now: float) -> None:
        job = self._job
        member = job.membership.members[push.key.worker]
        member.clock += 1
        member.steps += 1
        member.step_timer.begin(now)
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

    def _drop(self, push: Staged | None) -> None:
        """Commit the batches of a push that will not count, so that they are not dealt again."""
        if push is not None:
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
