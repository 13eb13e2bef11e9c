"""Departures: a worker leaves, is asked to leave, or its lease has ended."""

from pscommon.core.errors import InvalidRequestError, TooFewWorkersError
from psserver.core.coordinator.update_rounds import UpdateRounds
from psserver.core.job.job_state import JobState
from psserver.core.workers.members import WorkerState


class Departures:
    """Removes workers, or keeps the place of a lost one for a while.

    commands/ended_leases.py decides which of these.
    """

    def __init__(self, job: JobState, rounds: UpdateRounds) -> None:
        self._job, self._rounds = job, rounds

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

    def keep_place(self, worker: int, now: float) -> None:
        """Note that a lease has ended and the worker's place is kept for a while."""
        self._job.membership.members[worker].missing_since = now

    def end_absence(self, worker: int) -> None:
        """Note that a missing worker has shown a sign of life."""
        self._job.membership.members[worker].missing_since = None

    def lose(self, worker: int, reason: str, now: float) -> None:
        """Remove a worker whose lease has ended."""
        member = self._job.membership.members[worker]
        if member.is_registered and self._job.rules.on_loss.mode == "abort":
            text = f"{member} was lost: {reason} (--on-worker-loss abort)"
            self._job.fail(TooFewWorkersError(text))
        self._rounds.remove(member, WorkerState.LOST, reason, now)
