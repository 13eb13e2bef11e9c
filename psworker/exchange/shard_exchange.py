"""One shard's push and pull, with retries, and the combined result of all shards.

Theory of operation of `ShardExchange`:

- `step` makes one attempt. The executor repeats it until the exchange is finished.
- Pending answer: the server has the push, so the next attempt asks for the outcome only.
- No answer: the server may have lost the push. The next attempt sends all bytes again under the
  same number, so the push counts at most once.
- Outcome without weights: the next attempt is a pull.
- Finished: the push is decided and the requested weights have arrived.

`OpenShardExchange` begins before the push is complete; only its first attempt differs.
"""

from collections.abc import Iterator, Sequence
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
from pscommon.tracing.recorder import worker_spans
from pscommon.wire.frames import Frame
from psproto.v1 import parameter_server_pb2 as ps
from psworker.connection.retry import SLICE_SECONDS, RetryDeadline, TimeLimits
from psworker.core.results import PushResult, Status
from psworker.exchange.shard_pieces import ShardDownload, ShardUpload
from psworker.exchange.transfer import STATUS
from psworker.transport.exchange_calls import AnswerReceiver, Cancellation, ExchangeAnswer, Views
from psworker.transport.interface import Transport

REFUSALS = (FencedError, MismatchError, InvalidRequestError)
"""Errors that are raised for a rejected push instead of a result."""

SPARE_SECONDS = 30.0
"""Time in a call's deadline for the optimizer step and for calls of other workers."""

SLOWEST_BYTES_PER_SECOND = 10e6

LONGEST_BACKWARD_SECONDS = 24 * 3600.0
"""Deadline of a call that is open while the script computes. Pings detect a lost server."""


class SentBefore(Enum):
    """Whether a server may have received this push before.

    Attributes:
        NEVER: No server has received it.
        CALL: This call has sent it to another number of shards.
        EARLIER: An earlier call has sent it.
    """

    NEVER = auto()
    CALL = auto()
    EARLIER = auto()


class ShardExchange:
    """One shard's push and pull, repeated until it is decided.

    `send` and `views` are the shard's byte ranges of the caller's flat buffers.
    The attributes are valid once the exchange is finished.

    Attributes:
        result: The answer that decided the push, or answered the pull.
        version: Version of the received weights, else of the shard.
        lost_memory: The server did not know this worker's shared memory, so the bytes went over
            the network.
    """

    def __init__(
        self,
        transport: Transport,
        shard: int,
        header: ps.PushPullHeader,
        send: Sequence[memoryview],
        views: Views,
        nbytes: int,
        limits: TimeLimits,
        cancellation: Cancellation,
        sent: SentBefore = SentBefore.NEVER,
    ) -> None:
        """nbytes: Size of what is sent and received."""
        self.result = ps.ExchangeResult()
        self.version = 0
        self.lost_memory = False
        self._transport = transport
        self._shard = shard
        self._header = header
        self._send = send
        self._cancellation = cancellation
        self._sent = sent
        # Every shard must receive the push, also one that gets no bytes of it.
        self._pushes = header.has_data = header.initial or header.seq > 0
        self._answer_seconds = (
            min(SPARE_SECONDS, limits.connect / 2) + nbytes / SLOWEST_BYTES_PER_SECOND
        )
        self.retry = RetryDeadline(self._name(), transport, limits, cancellation.check)
        self._receiver = AnswerReceiver(views, self.retry.record_frame)
        self._started = self._ended = transport.clock.now()
        self._pull_seconds = 0.0
        self._attempts = 0
        self._was_pending = False

    @property
    def status(self) -> Status:
        """Outcome of the push for this call.

        A "duplicate" of a push that this call has sent is "applied": only its answer was lost.
        """
        status = STATUS[self.result.outcome]
        if status == "duplicate" and self.result.reason:  # the first copy did not count
            return "stale" if self.result.reason == "STALE" else "rejected"
        again = self._attempts > 1 or self._sent is SentBefore.CALL
        of_this_call = self._was_pending or (again and self._sent is not SentBefore.EARLIER)
        return "applied" if status == "duplicate" and of_this_call else status

    @property
    def reason(self) -> str:
        return f"{self.result.reason}: {self.result.detail}" if self.result.reason else ""

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase, as in PushResult.seconds; "push" is the time of no other phase."""
        wait, apply = self.result.wait_seconds, self.result.apply_seconds
        push = self._ended - self._started - wait - apply - self._pull_seconds
        return {"push": max(0.0, push), "wait": wait, "apply": apply, "pull": self._pull_seconds}

    def step(self, may_wait: bool = True) -> bool:
        """Make one attempt; return whether the exchange is finished.

        may_wait: The server may hold the call while the push is not decided.
        """
        wait = self.retry.next_wait_seconds(SLICE_SECONDS if may_wait else 0.0)
        frames: Iterator[Frame[ps.PushPullHeader]] | None = None
        began = worker_spans.now()
        try:
            try:
                frames = self._begin_attempt(wait)
                answer = self._transport.exchange(
                    self._shard,
                    self._header,
                    self._send,
                    self._receiver,
                    wait + self._answer_seconds if frames is None else LONGEST_BACKWARD_SECONDS,
                    self._cancellation,
                    frames,
                )
            finally:
                self.retry.end_attempt()
                if frames is not None:
                    self.retry.restart()  # the time in which the script computed is not silence
        except (WaitTimeoutError, InFlightError) as error:
            self.retry.handle_wait(str(error))
        except UnreachableError as error:
            # The server may have lost the push in a crash. Its log tells it whether a push that
            # is sent again has counted.
            self._header.has_data = self._pushes
            if error.reason == "NOT_ATTACHED":
                self._header.memory, self.lost_memory = 0, True
            self.retry.handle_failure(error)
        else:
            if began:
                self._record_spans(began, answer)
            return self._take(answer)
        return False

    def _record_spans(self, began: float, answer: ExchangeAnswer) -> None:
        header, shard = self._header, self._shard
        push, version = ((header.worker, header.seq),), answer.result.version
        worker_spans.add("send", began, push, shard=shard, ended=answer.sent_at)
        worker_spans.add("receive", answer.sent_at, push, version, shard)

    def _begin_attempt(self, wait: float) -> Iterator[Frame[ps.PushPullHeader]] | None:
        """Begin an attempt; return the frames of an open push, which it sends instead."""
        self._attempts += self._pushes
        self._header.wait_ms = round(wait * 1000)
        self.retry.begin_attempt()
        return None

    def _take(self, answer: ExchangeAnswer) -> bool:
        result = answer.result
        if result.outcome == ps.OUTCOME_PENDING:
            self._header.has_data, self._was_pending = False, self._pushes
            self.retry.handle_wait(result.waiting_for)
            return False
        if result.outcome not in STATUS:
            raise PSError(
                f"{self._server()} answered with the unknown outcome {result.outcome}. Try: one "
                "version of this software for the whole job"
            )
        self.decide(result)
        self._pull_seconds += answer.receive_seconds + result.pull_seconds
        return result.pulled or self._header.pull == ps.PULL_NONE or self._pull_alone()

    def decide(self, result: ps.ExchangeResult) -> None:
        """Record the answer that decided the push, or answered the pull."""
        if self._pushes or not self.result.outcome:
            self.result = result
        self.version = result.version
        self._ended = self._transport.clock.now()

    def _pull_alone(self) -> bool:
        """Make the next attempt a pull: the push is decided, but no weights came with it."""
        if not self._pushes:
            raise PSError(f"{self._server()} sent no weights")
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

    def _name(self) -> str:
        header = self._header
        name = (
            "the initial weights"
            if header.initial
            else f"push {header.seq}"
            if header.seq
            else "a pull"
        )
        return f"{name} of worker {header.worker} on {self._server()}"

    def _server(self) -> str:
        return f"shard {self._shard} at {self._transport.addresses[self._shard]}"


class OpenShardExchange(ShardExchange):
    """A shard's exchange whose first attempt begins before the push is complete.

    upload: The bytes of the push for this shard.
    download: The weights from this shard.
    """

    def __init__(
        self,
        transport: Transport,
        shard: int,
        header: ps.PushPullHeader,
        upload: ShardUpload,
        views: Views,
        download: ShardDownload,
        nbytes: int,
        limits: TimeLimits,
        cancellation: Cancellation,
    ) -> None:
        super().__init__(transport, shard, header, (), views, nbytes, limits, cancellation)
        self._receiver = AnswerReceiver(
            views, self.retry.record_frame, download.begin, download.record_bytes
        )
        self._upload = upload
        self._is_complete = False

    def _begin_attempt(self, wait: float) -> Iterator[Frame[ps.PushPullHeader]] | None:
        is_first = not self._attempts
        super()._begin_attempt(wait)
        if is_first and not self._header.memory and not self._upload.closed.is_set():
            self._header.open = True
            self.retry.end_attempt()  # until the script closes the push, the call waits for it
            return self._upload.frames(self._header)
        if not self._is_complete:
            self._wait_for_close()
        return None

    def _wait_for_close(self) -> None:
        """Wait until the push is complete, and use its bytes and header for the next attempt."""
        self.retry.end_attempt()
        self._upload.closed.wait()
        self.retry.begin_attempt()
        if self._upload.header is None:
            raise PSError("the push was given up")
        self._send, self._is_complete = self._upload.views, True
        self._header.MergeFrom(self._upload.header)
        self._header.open = False
        self.retry.restart()


def combined(exchanges: Sequence[ShardExchange]) -> PushResult:
    """Return one result for all shards.

    All shards follow one log and decide alike, but one of them may not know the reason any more.

    Raises:
        FencedError: The push was rejected because the worker is no member of the job.
        MismatchError: The push was rejected because it belongs to another job or model.
        InvalidRequestError: The request cannot be a push of this job.
    """
    statuses = [exchange.status for exchange in exchanges]
    status, reason = "applied" if "applied" in statuses else statuses[0], ""
    for exchange, own in zip(exchanges, statuses, strict=True):
        if own in ("rejected", "stale"):
            status, reason = own, exchange.reason
            if own == "rejected":
                _raise_refusal(exchange)
            break
    version, staleness, seconds, slowest = exchanges[0].version, 0, {}, -1.0
    for exchange in exchanges:
        version = min(version, exchange.version)
        staleness = max(staleness, exchange.result.staleness)
        by_phase = exchange.seconds
        if (total := sum(by_phase.values())) > slowest:
            seconds, slowest = by_phase, total
    return PushResult(status, version, staleness, reason, seconds)


def _raise_refusal(exchange: ShardExchange) -> None:
    reason = exchange.result.reason
    if reason in REASONS and issubclass(REASONS[reason].error, REFUSALS):
        raise error_for(reason, exchange.result.detail or reason)
