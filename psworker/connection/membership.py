"""A worker's place in the job: kept by heartbeats, lost for ever when the job went on without
it.
"""

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pscommon.core.errors import (
    FencedError,
    MismatchError,
    NonFiniteError,
    PSError,
    QuarantinedError,
    SnapshotError,
    TooFewWorkersError,
)
from pscommon.system.process_id import process_id
from psproto.v1 import coordinator_pb2 as co
from psworker.connection.retry import PendingRequests, WaitLogger
from psworker.core.activity import CallActivity
from psworker.core.push_sequence import PushSequence
from psworker.session.drain import Drain
from psworker.session.reports import ReportBuffer, ValueReport
from psworker.transport.grpc import Transport

BEATS_PER_LEASE = 5
MIN_CALL_SECONDS = 1.0
MIN_INTERVAL_SECONDS, MAX_INTERVAL_SECONDS = 0.01, 1.0
SILENT_SECONDS = 2.0
"""Two heartbeats in a row without an answer: people are told."""
LOOK_SECONDS = 0.25
"""At most, for an answer of whoever may be primary by now, and until they are asked again."""

LOST = (FencedError, MismatchError, NonFiniteError, SnapshotError, TooFewWorkersError)
"""Answers to a heartbeat after which there is no place to keep, here or in the job."""

log = logging.getLogger("psworker")


@dataclass(frozen=True, slots=True)
class StepProgress:
    """What the next heartbeat says for people: steps made, seconds of a step, and the phase the
    worker is in.
    """

    steps: int = 0
    step_seconds: float = 0.0
    samples_per_second: float = 0.0
    phase: str = ""


class WorkerMembership:
    """All that ends with a worker's place; shared by the client and its heartbeat.

    open_loop: loops before it had ended when the worker joined. known_loops: how many had begun
    by then; open_loops: those of them that had not ended. policy: the job's, as the last
    heartbeat said. pushes: their numbers. received: batches got so far, by loop. at_least: the
    version that pulls must bring. workers: how many are registered; is_first: this worker is the
    first of them; both as last heard.
    """

    def __init__(
        self,
        job: str,
        worker: int,
        open_loop: int = 0,
        policy: str = "",
        known_loops: int = 0,
        open_loops: Iterable[int] = (),
    ) -> None:
        self.job = job
        self.worker = worker
        self.open_loop = open_loop
        self._known_loops, self._open_loops = known_loops, frozenset(open_loops)
        self.policy = policy
        self.reports = ReportBuffer(time.monotonic)
        self.workers, self.is_first = 0, False
        self.pushes = PushSequence()
        self.received: dict[int, int] = {}
        self.at_least = 0
        self.progress = StepProgress()
        self.stopping = False
        self._lost: PSError | None = None

    def has_ended(self, loop: int) -> bool:
        """Had this loop ended when the worker joined?"""
        return loop < self._known_loops and loop not in self._open_loops

    def expect(self, version: int) -> None:
        """Pulls from now on bring at least this version."""
        self.at_least = max(self.at_least, version)

    def lose(self, error: PSError) -> None:
        self._lost = self._lost or error

    def check(self) -> None:
        """Why the place is lost, if it is: FencedError, MismatchError for another job on the
        same servers, or what has ended the job."""
        if self._lost is not None:
            raise type(self._lost)(str(self._lost), self._lost.reason)

    def check_curable(self) -> None:
        """Raises what a new place would not cure: QuarantinedError."""
        if isinstance(self._lost, QuarantinedError):
            self.check()

    def beat(
        self, lane: Transport, timeout: float, drain: Drain, no_call_seconds: float = 0.0
    ) -> str:
        """Send one heartbeat. Return why no server answered, or an empty text; silence is no
        loss.
        """
        now, reports = self.progress, self.reports.unsent()
        request = co.HeartbeatRequest(
            job=self.job,
            worker=self.worker,
            steps=now.steps,
            step_seconds=now.step_seconds,
            samples_per_second=now.samples_per_second,
            phase=now.phase,
            process=process_id(),
            no_call_seconds=no_call_seconds,
            values=self.wire_values(reports),
        )
        try:
            answer = lane.heartbeat(request, timeout)
        except LOST as error:
            self.lose(error)
            log.info("worker %d is out of job %s: %s", self.worker, self.job, error)
        except PSError as error:
            return str(error)
        else:
            lane.learn(self.job, answer.addresses, answer.terms, answer.standbys)
            self.reports.confirm(reports)
            self.policy = answer.policy or self.policy
            self.learn_standing(answer)
            if answer.stopping and not self.stopping:
                log.info(
                    "job %s is over: worker %d ends its step and leaves", self.job, self.worker
                )
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
        """Take how many workers there are, and whether this one is the first."""
        self.workers, self.is_first = answer.workers, answer.first


class SilenceLogger:
    """Of the coordinator, towards one worker's heartbeats: said once it has lasted, now and then
    while it does, and at its end."""

    def __init__(self, worker: int, now: float) -> None:
        self._worker = worker
        self._heard = now
        self._announcer: WaitLogger | None = None

    def look(self, now: float, problem: str) -> None:
        """After a heartbeat: why nobody has answered it, or empty."""
        silent = now - self._heard
        text = f"no answer to worker {self._worker}'s heartbeats for {silent:.0f} s: {problem}"
        if not problem:
            if self._announcer is not None:
                log.info(
                    "worker %d's heartbeats are answered again, after %.0f s", self._worker, silent
                )
            self._heard, self._announcer = now, None
        elif self._announcer is not None:
            self._announcer.say(now, text)
        elif silent >= SILENT_SECONDS:
            self._announcer = WaitLogger(now)
            self._announcer.tell(now, text)


class Heartbeat:
    """Sends one every fifth of a lease, at least one a second, from a daemon thread, until
    stopped or fenced.

    Tells the drain what the servers ask, and people of the waits and of servers that do not
    answer. Ends what stalls.
    """

    def __init__(
        self,
        place: WorkerMembership,
        lane: Transport,
        lease_seconds: float,
        drain: Drain,
        waits: PendingRequests,
    ) -> None:
        self._place = place
        self._lane = lane
        self._drain = drain
        self._waits = waits
        self._interval = max(
            min(lease_seconds / BEATS_PER_LEASE, MAX_INTERVAL_SECONDS), MIN_INTERVAL_SECONDS
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"heartbeat-{place.worker}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """No heartbeat is under way any more when this returns, unless a server is holding one
        up.
        """
        self._stop.set()
        self._thread.join(self._call_seconds + 1.0)

    @property
    def _call_seconds(self) -> float:
        return max(self._interval, MIN_CALL_SECONDS)

    def _run(self) -> None:
        clock = self._lane.clock
        silence, problem = SilenceLogger(self._place.worker, clock.now()), ""
        activity, waits = CallActivity(clock.now()), self._waits
        with suppress(PSError):  # the place is lost, or the lane is closed
            while not self._rested(bool(problem)) and not self._drain.given_up:
                no_call = activity.beat(clock.now(), waits.calls, waits.any)
                problem = self._place.beat(self._lane, self._call_seconds, self._drain, no_call)
                silence.look(clock.now(), problem)
                self._lane.end_stalled()
                self._waits.remind(clock.now())
                self._place.check()

    def _rested(self, silent: bool) -> bool:
        """After the time between two heartbeats; while nobody answers, it is used to find who is
        primary by now.

        True: there is to be no heartbeat any more.
        """
        if not silent:
            return self._stop.wait(self._interval)
        end, pause = time.monotonic() + self._interval, min(LOOK_SECONDS, self._interval)
        while not self._lane.look_around(self._place.job, pause) and time.monotonic() < end:
            if self._stop.wait(pause):
                break
        return self._stop.is_set()
