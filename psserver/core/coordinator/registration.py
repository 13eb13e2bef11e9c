"""Workers come and go: one registers its model, leaves, is asked to leave, or loses its lease."""

from collections.abc import Mapping
from typing import Literal

from pscommon.core.errors import InvalidRequestError, TooFewWorkersError, out_of_the_job
from pscommon.core.limits import ALLREDUCE
from pscommon.core.model_spec import ModelSpec
from psserver.core.coordinator.update_rounds import UpdateRounds
from psserver.core.data.resume_rules import adopted_model, model_mismatch
from psserver.core.job.job_state import JobState
from psserver.core.workers import replacement
from psserver.core.workers.members import Member, WorkerState

RegistrationReply = Literal["ready", "upload", "pending"]


class Registration:
    """Registers workers, and removes them.

    A restarted one takes the place of its predecessor. The recorder decides whether the place of a
    lost one is kept for a while.
    """

    def __init__(self, job: JobState, rounds: UpdateRounds) -> None:
        self._job, self._rounds = job, rounds

    def register(
        self, worker: int, spec: ModelSpec, now: float, seed: int = 0
    ) -> RegistrationReply:
        """Register a worker with its model. The first one's model and seed become the job's.

        Raises:
            MismatchError: The model is not the job's; the message lists the differences.
            InvalidRequestError: The policy does not serve a model of several optimizers.
        """
        job = self._job
        member = job.member(worker, now)
        if job.policy.name == ALLREDUCE and isinstance(spec.optimizer, Mapping):
            raise InvalidRequestError(
                "registration refused: policy allreduce serves models of one optimizer, not of "
                f"{', '.join(spec.optimizer)}. Try: policy sync"
            )
        if job.model is None:
            job.model, job.uploading_worker, job.seed = spec, worker, seed
        if job.is_resumed:
            job.model = adopted_model(spec, job.model) or job.model
        if spec.differences(job.model):
            raise model_mismatch(spec, job.model, job.ledger.origin)
        if not job.begun:
            return "upload" if job.uploading_worker == worker else "pending"
        job.is_resumed = False
        if (successor := replacement.successor(job.membership.registered(), member)) is not None:
            self._remove_replaced(member, successor, now)
            raise out_of_the_job(worker, member.reason)
        self._activate(member, now)
        return "ready"

    def unresolved_peer(self, worker: int, asked_at: float) -> Member | None:
        """Return the worker whose place a registering worker may have to take, if that is open.

        With --on-worker-loss wait the place of a dead worker is kept for its successor. The
        registration waits until the other worker shows a sign of life or its lease ends.
        """
        member = self._job.membership.members.get(worker)
        if (
            self._job.rules.on_loss.mode != "wait"
            or member is None
            or member.is_registered
            or not member.is_current
        ):
            return None
        registered = self._job.membership.registered()
        if replacement.predecessor(registered, member):
            return None
        return replacement.unresolved_peer(registered, member, asked_at)

    def leave(self, worker: int, reason: str, now: float) -> None:
        """Remove a worker that is done (empty reason) or gives up."""
        member = self._job.membership.members.get(worker)
        if member is not None and member.is_current:
            self._rounds.remove(member, WorkerState.LEFT, reason, now)

    def drain(self, worker: int) -> None:
        """Ask a worker to leave after its current step."""
        membership = self._job.membership
        member = membership.members.get(worker)
        if member is None or not member.is_current:
            here = ", ".join(str(m.worker) for m in membership.current()) or "none"
            raise InvalidRequestError(
                f"worker {worker} cannot be drained: it is not a member. Members: {here}"
            )
        member.draining = True

    def lose(self, worker: int, reason: str, now: float) -> None:
        """Remove a worker whose lease has ended."""
        member = self._job.membership.members[worker]
        if member.is_registered and self._job.rules.on_loss.mode == "abort":
            text = f"{member} was lost: {reason} (--on-worker-loss abort)"
            self._job.fail(TooFewWorkersError(text))
        self._rounds.remove(member, WorkerState.LOST, reason, now)

    def _activate(self, member: Member, now: float) -> None:
        membership = self._job.membership
        old = (
            None
            if member.is_registered
            else replacement.predecessor(membership.registered(), member)
        )
        if self._job.started and not member.is_registered:
            member.step_timer.begin(now)
        if old is None:
            membership.activate(member)
            return self._rounds.advance(now)
        membership.replace(old, member)
        self._job.ledger.transfer(old.worker, member.worker)
        return self._remove_replaced(old, member, now)

    def _remove_replaced(self, old: Member, new: Member, now: float) -> None:
        reason = f"worker {new.worker} was started in its place"
        self._rounds.remove(old, WorkerState.LOST, reason, now)
