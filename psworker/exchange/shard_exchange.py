"""One push and pull against all shards: each shard's part until it is decided, then one result
of all.
"""

from collections.abc import Sequence
from enum import Enum, auto

from pscommon.core.errors import (
    REASONS,
    FencedError,
    InFlightError,
    InvalidRequestError,
    MismatchError,
    PSError,
    UnreachableError,
    WaitTimeoutError,
    error_for,
)
from psproto.v1 import parameter_server_pb2 as ps
from psworker.connection.retry import RetryDeadline, TimeLimits
from psworker.connection.shard_call import SLICE_SECONDS
from psworker.core.results import PushResult, Status
from psworker.transport.grpc import Transport
from psworker.transport.streams import AnswerReceiver, Cancellation, ExchangeAnswer

REFUSALS = (FencedError, MismatchError, InvalidRequestError)
"""Errors that a rejected push is raised as."""

SPARE_SECONDS = 30.0
"""What it may take besides: for the apply, and for calls of others."""

SLOWEST_BYTES_PER_SECOND = 10e6

STATUS: dict[int, Status] = {
    ps.OUTCOME_NONE: "none",
    ps.OUTCOME_APPLIED: "applied",
    ps.OUTCOME_DUPLICATE: "duplicate",
    ps.OUTCOME_STALE: "stale",
    ps.OUTCOME_REJECTED: "rejected",
}


class SentBefore(Enum):
    """Who may have sent this push before: NEVER anybody; this CALL, to another number of shards;
    an EARLIER call.
    """

    NEVER = auto()
    CALL = auto()
    EARLIER = auto()


class ShardExchange:
    """One shard's part: a machine that makes one attempt a step until the push is decided and
    the weights are here.

    send, and the views of receiver, are the shard's ranges of the caller's tapes. Once finished:
    result (how the push ended), version (of what was received, else of the shard), status,
    seconds; lost_memory: the server did not know this worker's shared memory, so the bytes went
    over the wire.
    """

    def __init__(
        self,
        lane: Transport,
        shard: int,
        header: ps.PushPullHeader,
        send: Sequence[memoryview],
        receiver: AnswerReceiver,
        limits: TimeLimits,
        cancellation: Cancellation,
        sent: SentBefore = SentBefore.NEVER,
    ) -> None:
        self.result = ps.ExchangeResult()
        self.version = 0
        self.lost_memory = False
        self._lane = lane
        self._shard = shard
        self._header = header
        self._send = send
        self._receiver = receiver
        self._cancellation = cancellation
        self._sent = sent
        # a push has data on every shard, be it no bytes: each must know of it
        self._pushes = header.has_data = header.initial or header.seq > 0
        self._nbytes = sum(
            view.nbytes for view in (*send, *receiver.views(ps.ExchangeResult(pulled=True)))
        )
        self._silence = limits.connect / 2
        self._retry = RetryDeadline(self._what(), lane.clock, limits)
        receiver.moved = self._retry.record_frame
        self._started = self._ended = lane.clock.now()
        self._pull_seconds = 0.0
        self._attempts = 0
        self._was_pending = False

    @property
    def status(self) -> Status:
        """A "duplicate" of what this call itself sent, its answer lost or not there yet, is a
        push that counted.
        """
        status = STATUS[self.result.outcome]
        if status == "duplicate" and self.result.reason:  # of a push that was decided against
            return "stale" if self.result.reason == "STALE" else "rejected"
        again = self._attempts > 1 or self._sent is SentBefore.CALL
        of_this_call = self._was_pending or (again and self._sent is not SentBefore.EARLIER)
        return "applied" if status == "duplicate" and of_this_call else status

    @property
    def reason(self) -> str:
        return f"{self.result.reason}: {self.result.detail}" if self.result.reason else ""

    @property
    def seconds(self) -> dict[str, float]:
        """Where the time went, as PushResult.seconds; what nobody accounts for was sending."""
        wait, apply = self.result.wait_seconds, self.result.apply_seconds
        push = self._ended - self._started - wait - apply - self._pull_seconds
        return {"push": max(0.0, push), "wait": wait, "apply": apply, "pull": self._pull_seconds}

    def run(self) -> None:
        """All steps, in the calling thread."""
        while not self.step(SLICE_SECONDS):
            pass

    def step(self, slice_seconds: float) -> bool:
        """One attempt, in which the server may hold the call for so long. True: finished."""
        try:
            answer = self._asked(self._retry.next_wait_seconds(slice_seconds))
        except (WaitTimeoutError, InFlightError) as error:
            self._retry.handle_wait(str(error))
        except UnreachableError as error:
            # it may have died with what it held: send everything again, it knows what has counted
            self._header.has_data = self._pushes
            if error.reason == "NOT_ATTACHED":
                self._header.memory, self.lost_memory = 0, True
            self._retry.handle_failure(error)
        else:
            return self._take(answer)
        return False

    def _asked(self, wait: float) -> ExchangeAnswer:
        self._retry.begin_attempt()
        try:
            return self._attempt(wait)
        finally:
            self._retry.end_attempt()

    def _attempt(self, wait: float) -> ExchangeAnswer:
        self._attempts += self._pushes
        self._header.wait_ms = round(wait * 1000)
        timeout = wait + min(SPARE_SECONDS, self._silence) + self._nbytes / SLOWEST_BYTES_PER_SECOND
        return self._lane.exchange(
            self._shard, self._header, self._send, self._receiver, timeout, self._cancellation
        )

    def _take(self, answer: ExchangeAnswer) -> bool:
        result = answer.result
        if result.outcome == ps.OUTCOME_PENDING:
            self._header.has_data, self._was_pending = False, self._pushes
            self._retry.handle_wait(result.waiting_for)
            return False
        if result.outcome not in STATUS:
            raise PSError(
                f"{self._who()} answered with outcome {result.outcome}, which this version does "
                f"not know"
            )
        self.decide(result)
        self._pull_seconds += answer.receive_seconds + result.pull_seconds
        return result.pulled or self._header.pull == ps.PULL_NONE or self._pull_alone()

    def decide(self, result: ps.ExchangeResult) -> None:
        """So the push has ended, or the pull has been answered."""
        if self._pushes or not self.result.outcome:
            self.result = result
        self.version = result.version
        self._ended = self._lane.clock.now()

    def _pull_alone(self) -> bool:
        """The push is decided, but no weights came with the answer: ask for them."""
        if not self._pushes:
            raise PSError(f"{self._who()} sent no weights")
        before = self._header
        self._header = ps.PushPullHeader(
            job=before.job,
            worker=before.worker,
            pull=before.pull,
            min_version=before.min_version,
            memory=before.memory,
            shards=before.shards,
        )
        self._pushes = False
        return False

    def _what(self) -> str:
        header = self._header
        name = (
            "the initial weights"
            if header.initial
            else f"push {header.seq}"
            if header.seq
            else "a pull"
        )
        return f"{name} of worker {header.worker} on {self._who()}"

    def _who(self) -> str:
        return f"shard {self._shard} at {self._lane.addresses[self._shard]}"


def combined(parts: Sequence[ShardExchange]) -> PushResult:
    """One result of all shards. They follow one log and so decide alike, but one may have
    forgotten the reason.

    FencedError or MismatchError where the push was rejected because this worker or job is not
    the job's; InvalidRequestError where it cannot be a push of this job.
    """
    unfit = next((part for part in parts if part.status in ("rejected", "stale")), None)
    if unfit is not None and unfit.status == "rejected":
        _raise_if_out(unfit)
    status = (
        unfit.status
        if unfit
        else "applied"
        if any(p.status == "applied" for p in parts)
        else parts[0].status
    )
    return PushResult(
        status=status,
        version=min(part.version for part in parts),
        staleness=max(part.result.staleness for part in parts),
        reason=unfit.reason if unfit else "",
        seconds=max((part.seconds for part in parts), key=lambda row: sum(row.values())),
    )


def _raise_if_out(part: ShardExchange) -> None:
    reason = part.result.reason
    if reason in REASONS and issubclass(REASONS[reason].error, REFUSALS):
        raise error_for(reason, part.result.detail or reason)
