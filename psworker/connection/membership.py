"""A worker's membership in the job, and the heartbeats that keep it.

A membership that the servers have fenced is lost for good: the worker has to rejoin.
"""

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from typing import NamedTuple

from pscommon.core.errors import (
    FencedError,
    MismatchError,
    NonFiniteError,
    PSError,
    QuarantinedError,
    SnapshotError,
    TooFewWorkersError,
)
from pscommon.core.script_place import PassName
from pscommon.system.process_id import process_id
from pscommon.telemetry.logs import get_logger
from pscommon.tracing.batch import encode_spans
from pscommon.tracing.clock_offset import OffsetEstimate
from pscommon.tracing.recorder import worker_spans
from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.requests import HEARTBEAT, LEAVE, Stub
from psproto.v1 import coordinator_pb2 as co
from psworker.connection.discovery import use_tokens_of
from psworker.connection.retry import LogTimer, PendingRequests
from psworker.core.clock import CallActivity
from psworker.core.push_sequence import PushSequence
from psworker.core.results import StepProgress
from psworker.session import metrics
from psworker.session.drain import Drain
from psworker.session.reports import ReportBuffer, ValueReport
from psworker.transport.interface import Transport

BEATS_PER_LEASE = 5
MIN_CALL_SECONDS = 1.0
MIN_INTERVAL_SECONDS, MAX_INTERVAL_SECONDS = 0.01, 1.0
SILENT_SECONDS = 2.0
"""Time without an answer, two heartbeats in a row, before it is logged."""
REPORT_LOSS_SECONDS = 1.0
SEARCH_SECONDS = 0.25
"""Longest deadline and longest pause while a worker looks for a new primary."""

FINAL_ERRORS = (FencedError, MismatchError, NonFiniteError, SnapshotError, TooFewWorkersError)
"""Answers to a heartbeat that end the membership."""

log = get_logger(__name__)


class WorkerMembership:
    """State that is discarded when the worker is fenced; the client and its heartbeat share it.

    Args:
        passes: The passes that had begun when the worker joined, by loader.
        known_loops: Number of loops that had begun then, with and without a name.

    Attributes:
        job: The job's identifier.
        training: Name of the training.
        worker: The worker's number; 0 for an observer.
        policy: The job's policy, as of the last heartbeat.
        reports: Values that the script has reported.
        workers: Number of workers that train or will begin to, as of the last answer.
        is_first: This worker is the first of them, as of the last answer.
        pushes: Numbers of this worker's pushes.
        received_batches: Number of batches received so far, by pass or numbered loop.
        min_version: Smallest version that a pull may return.
        update_counts: Number of updates of each optimizer at the registration; empty with one.
        progress: Steps and phase for the next heartbeat.
        stopping: The job ends.
    """

    def __init__(
        self,
        job: str,
        worker: int,
        policy: str = "",
        passes: Iterable[co.LoaderPasses] = (),
        known_loops: int = 0,
        training: str = "",
    ) -> None:
        self.job = job
        self.training = training
        self.worker = worker
        self._passes = {each.loader: (each.begun, frozenset(each.open)) for each in passes}
        # an earlier release wrote the job: its loops get their names one after another
        self._has_unnamed_loops = known_loops > sum(begun for begun, _ in self._passes.values())
        self.policy = policy
        self.reports = ReportBuffer(time.monotonic)
        self.workers, self.is_first = 0, False
        self.pushes = PushSequence()
        self.received_batches: dict[PassName | int, int] = {}
        self.min_version = 0
        self.update_counts: dict[str, int] = {}
        self.progress = StepProgress()
        self.stopping = False
        self._clock_offset = OffsetEstimate()
        self._lost: PSError | None = None

    def has_ended(self, name: PassName) -> bool:
        """Return whether this pass had ended when the worker joined."""
        begun, still_open = self._passes.get(name.loader, (0, frozenset()))
        if name.number >= begun:
            return self._has_unnamed_loops
        return name.number not in still_open

    def require_version(self, version: int) -> None:
        """Require at least this version from later pulls."""
        self.min_version = max(self.min_version, version)

    def lose(self, error: PSError) -> None:
        """Record that the membership is lost. Only the first error is kept."""
        self._lost = self._lost or error

    def check(self) -> None:
        """Raise the error that ended the membership, if it is lost.

        Raises:
            FencedError: The job went on without this worker.
            MismatchError: The servers run another job.
            PSError: The error that ended the job.
        """
        if self._lost is not None:
            raise type(self._lost)(str(self._lost), self._lost.reason)

    def check_curable(self) -> None:
        """Raise QuarantinedError, the loss that a rejoin does not cure."""
        if isinstance(self._lost, QuarantinedError):
            self.check()

    def send_heartbeat(
        self, transport: Transport, timeout: float, drain: Drain, no_call_seconds: float = 0.0
    ) -> str:
        """Send one heartbeat; return why no server answered, or an empty text.

        A missing answer does not end the membership.

        timeout: Deadline in seconds.
        no_call_seconds: Time since the script's last call.
        """
        reports, progress = self.reports.unsent(), self.progress
        request = co.HeartbeatRequest(
            job=self.job,
            worker=self.worker,
            process=process_id(),
            steps=progress.steps,
            step_seconds=progress.step_seconds,
            samples_per_second=progress.samples_per_second,
            phase=progress.phase,
            phases=co.PhaseSeconds(**progress.phase_seconds),
            no_call_seconds=no_call_seconds,
            values=self.wire_values(reports),
        )
        if worker_spans.is_on:
            spans, dropped = worker_spans.take()
            request.spans = encode_spans(spans, dropped, self._clock_offset.best)
            metrics.trace_steps_dropped(dropped)
        sent = time.monotonic()
        try:
            answer = transport.request(HEARTBEAT, request, timeout)
        except FINAL_ERRORS as error:
            self.lose(error)
            log.info("membership_lost", worker=self.worker, job=self.job, reason=str(error))
        except PSError as error:
            return str(error)
        else:
            if answer.clock:  # a release without spans has none
                self._clock_offset.add(sent, time.monotonic(), answer.clock)
            worker_spans.set_wanted(answer.trace)
            transport.learn(self.job, answer.addresses, answer.terms, answer.standbys)
            self.reports.confirm(reports)
            self.policy = answer.policy or self.policy
            self.learn_standing(answer)
            if answer.stopping and not self.stopping:
                log.info("job_ending", job=self.job, worker=self.worker)
                self.stopping = True
            if answer.draining:
                drain.ask()
        return ""

    def wire_values(self, reports: Sequence[ValueReport]) -> list[co.ReportedValue]:
        """Return reported values as they are sent."""
        return [
            co.ReportedValue(
                name=r.name, value=r.value, version=r.version, age_seconds=self.reports.age(r)
            )
            for r in reports
        ]

    def learn_standing(
        self, answer: co.JoinResponse | co.RegisterResponse | co.HeartbeatResponse
    ) -> None:
        """Take the number of workers, and whether this one is the first, from an answer."""
        self.workers, self.is_first = answer.workers, answer.first


class SilenceLogger:
    """Logs that the coordinator does not answer a worker's heartbeats.

    It logs after SILENT_SECONDS, at intervals while the silence lasts, and at its end.
    """

    def __init__(self, worker: int, now: float) -> None:
        self._worker = worker
        self._last_answer = now
        self._log_timer: LogTimer | None = None

    def record(self, now: float, problem: str) -> None:
        """Record a heartbeat. problem: Why no server answered it; empty if one did."""
        silent = now - self._last_answer
        if not problem:
            if self._log_timer is not None:
                log.info("heartbeats_answered", worker=self._worker, silent_seconds=round(silent))
            self._last_answer, self._log_timer = now, None
            return
        is_first = self._log_timer is None and silent >= SILENT_SECONDS
        if is_first:
            self._log_timer = LogTimer(now)
        if self._log_timer is not None and self._log_timer.is_due(now, at_once=is_first):
            log.info(
                "heartbeats_unanswered",
                worker=self._worker,
                silent_seconds=round(silent),
                problem=problem,
            )


class Heartbeat:
    """A daemon thread that sends heartbeats until it is stopped or the membership is lost.

    The interval is a fifth of the lease, at most one second. The thread also passes requests to
    leave to the drain, logs long waits and silent servers, and ends stalled transfers.
    """

    def __init__(
        self,
        membership: WorkerMembership,
        transport: Transport,
        lease_seconds: float,
        drain: Drain,
        waits: PendingRequests,
    ) -> None:
        self._membership = membership
        self._transport = transport
        self._drain = drain
        self._waits = waits
        self._interval = max(
            min(lease_seconds / BEATS_PER_LEASE, MAX_INTERVAL_SECONDS), MIN_INTERVAL_SECONDS
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"heartbeat-{membership.worker}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and wait for a heartbeat in flight for at most its deadline + 1 s."""
        self._stop.set()
        self._thread.join(self._call_seconds + 1.0)

    @property
    def _call_seconds(self) -> float:
        return max(self._interval, MIN_CALL_SECONDS)

    def _run(self) -> None:
        clock = self._transport.clock
        silence, problem = SilenceLogger(self._membership.worker, clock.now()), ""
        activity, waits = CallActivity(clock.now()), self._waits
        with suppress(PSError):  # the membership is lost, or the transport is closed
            while not self._wait(bool(problem)) and not self._drain.given_up:
                no_call = activity.beat(clock.now(), waits.calls, bool(waits.open))
                problem = self._membership.send_heartbeat(
                    self._transport, self._call_seconds, self._drain, no_call
                )
                silence.record(clock.now(), problem)
                self._transport.end_stalled()
                self._waits.remind(clock.now())
                self._membership.check()

    def _wait(self, silent: bool) -> bool:
        """Wait for one interval; return whether the thread is to stop.

        While no server answers, the interval is used to look for a new primary.
        """
        if not silent:
            return self._stop.wait(self._interval)
        end, pause = time.monotonic() + self._interval, min(SEARCH_SECONDS, self._interval)
        while (
            not self._transport.find_primaries(self._membership.job, pause)
            and time.monotonic() < end
        ):
            if self._stop.wait(pause):
                break
        return self._stop.is_set()


class LossTicket(NamedTuple):
    """What the ranks of a group need to notice and to report that their worker is lost.

    Attributes:
        address: Address of shard 0.
        job: The job's identifier.
        worker: The worker's number.
        key: The worker's key, hexadecimal.
        lease_seconds: How long the servers wait for a sign of life of the worker.
    """

    address: str
    job: str
    worker: int
    key: str
    lease_seconds: float


def report_loss(ticket: LossTicket, reason: str) -> None:
    """Tell the servers that the worker is lost, so that --on-worker-loss decides at once.

    Raises grpc.RpcError; then the worker's lease ends later.
    """
    use_tokens_of([ticket.address])  # the token of a local job is not in this process's settings
    request = co.LeaveRequest(job=ticket.job, worker=ticket.worker, reason=reason, lost=True)
    with closing(open_channel(Endpoint(ticket.address))) as channel:
        Stub(channel, LEAVE)(request, REPORT_LOSS_SECONDS, bytes.fromhex(ticket.key))
