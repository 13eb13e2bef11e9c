"""Opens the reduce rounds of policy allreduce; psserver/core/job/reduction.py has the rules."""

from pscommon.core.errors import InvalidRequestError, TooFewWorkersError
from pscommon.core.limits import ALLREDUCE
from psserver.core.coordinator.participation import Participation
from psserver.core.coordinator.update_rounds import UpdateRounds
from psserver.core.job.job_state import JobState
from psserver.core.job.reduction import DOWNLOAD, NOTHING, ReduceRequest, ReduceRound


class ReduceRounds:
    """Answers the requests of workers for reduce rounds."""

    def __init__(self, job: JobState, rounds: UpdateRounds, participation: Participation) -> None:
        self._job, self._rounds, self._participation = job, rounds, participation

    def ask(self, request: ReduceRequest, now: float) -> ReduceRound | None:
        """Return the round that a worker takes part in; None: it waits for other workers.

        Of kind "none" it has the newest weights, and no worker waits for them; of kind "download"
        the servers have them.
        """
        job, reduction, worker = self._job, self._job.reduction, request.worker
        member = job.member(worker, now)
        if job.policy.name != ALLREDUCE:
            raise InvalidRequestError(
                f"reduce round refused: the job's policy is {job.policy.name}, not allreduce"
            )
        number, answer = reduction.answers.get(worker, (0, NOTHING))
        before = reduction.waiting.get(worker, request)
        if request.number <= number or request.number < before.number:
            return answer if request.number == number else None  # a late or repeated request
        if worker in reduction.open.workers:
            reduction.leave_round(request)
            self._rounds.advance(now)
        reduction.waiting[worker] = request
        reduction.versions[worker] = request.version
        if request.samples:
            self._participation.wake(member)
        self._open_round(now)
        return self._answer(request)

    def _answer(self, request: ReduceRequest) -> ReduceRound | None:
        job, reduction, worker = self._job, self._job.reduction, request.worker
        if worker in reduction.waiting and reduction.open.kind != "gradients":
            is_lacking = any(each.version != job.version for each in reduction.waiting.values())
            if request.version != job.version and reduction.uploaded == job.version:
                reduction.answer(request, DOWNLOAD)
            elif not request.samples and not is_lacking:
                reduction.answer(request, NOTHING)
        number, answer = reduction.answers.get(worker, (0, NOTHING))
        return answer if number == request.number else None

    def _open_round(self, now: float) -> None:
        """Open a round if none is open and every active worker has asked for one."""
        job, reduction = self._job, self._job.reduction
        if reduction.open.number or not job.has_started() or job.reshard is not None:
            return
        asked, registered = reduction.waiting, job.membership.registered()
        requests = [asked[each.worker] for each in registered if each.worker in asked]
        active = job.membership.active()
        if job.failure is not None or any(member.worker not in asked for member in active):
            return
        newest = [request for request in requests if request.version == job.version]
        if not newest:
            known = reduction.versions.values()
            if requests and job.version not in known and reduction.uploaded != job.version:
                self._fail_without_weights()
            return
        source = newest[0].worker
        ready = [request for request in newest if request.samples]
        if len(newest) < len(requests):
            reduction.begin("weights", requests, source)
        elif reduction.uploaded != job.version and (
            reduction.is_cut_wanted or job.cuts.due(job.version, now)
        ):
            reduction.begin("upload", newest[:1], source)
        elif job.cuts.due_at(job.version) or not all(asked[m.worker].samples for m in active):
            return  # a worker that only wanted weights has its answer next, and computes
        elif ready:
            reduction.begin("gradients", ready)

    def _fail_without_weights(self) -> None:
        job = self._job
        job.fail(
            TooFewWorkersError(
                f"{job.reduction.describe_loss(job.version)}. Try: restart the servers, which "
                "continue from the newest snapshot"
            )
        )
