"""Retries of one request: while no server answers, and while it waits for late workers.

Theory of operation of `RetryDeadline`:

- Failure (`handle_failure`): no server answered. The request is repeated after a growing pause,
  until the silence lasts `TimeLimits.connect` seconds.
- Wait (`handle_wait`): a server answered that the request waits for other workers. The silence
  ends, and the request is repeated for at most `TimeLimits.wait` seconds.
- Progress (`restart`, `record_frame`): `restart` resets wait and silence. A frame ends the
  silence if the attempt has moved more frames than any attempt before it.
"""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pscommon.core.errors import UnreachableError, WaitTimeoutError
from pscommon.telemetry.logs import get_logger
from pscommon.wire.requests import A, Q, Request
from psworker.session.drain import DrainedError
from psworker.transport.interface import Transport

LOG_SECONDS = 8.0  # so each wait of 10 s has a log line that names its cause
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 0.25
SLICE_SECONDS = 1.0
"""Longest time for which a server holds a call before it names what the call waits for."""
# Once the job is known to end, servers that do not answer do not come back.
LAST_SECONDS = 2.0

CALL_SECONDS = 10.0
"""Longest deadline of a call that a server answers at once."""

log = get_logger(__name__)


class PendingRequests:
    """Requests that are in flight. The heartbeat thread logs those that take long.

    Attributes:
        calls: Number of requests so far, and of other calls of the script.
        open: Those in flight.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.open: set[RetryDeadline] = set()
        self._log_times: dict[str, float] = {}
        self._log_lock = threading.Lock()

    def can_log_failure(self, now: float, what: str) -> bool:
        """Return whether to log that this request fails; True at most once in LOG_SECONDS."""
        with self._log_lock:
            self._log_times = {
                each: then for each, then in self._log_times.items() if now - then < LOG_SECONDS
            }
            return self._log_times.setdefault(what, now) == now

    def remind(self, now: float) -> None:
        """Log the requests that have taken long."""
        for retry in list(self.open):
            retry.remind(now)


@dataclass(frozen=True)
class TimeLimits:
    """Time limits of a request.

    Attributes:
        connect: Seconds for which a server may be silent without a break.
        wait: Seconds to wait for other workers.
        check: Called before each repetition; raises where a repetition is useless.
        unanswered: Called before `check` where a server did not answer.
        hurry: Returns whether the job ends.
        deadline: Returns the clock's time at which `check` will raise.
        waits: The requests that are in flight.
    """

    connect: float
    wait: float
    check: Callable[[], None] = lambda: None
    unanswered: Callable[[], None] = lambda: None
    hurry: Callable[[], bool] = lambda: False
    deadline: Callable[[], float] = lambda: math.inf
    waits: PendingRequests = field(default_factory=PendingRequests)

    @property
    def call(self) -> float:
        """Deadline in seconds of a call that the server answers at once."""
        return min(CALL_SECONDS, self.connect)


class LogTimer:
    """Decides when to log a wait: every LOG_SECONDS, first after LOG_SECONDS."""

    def __init__(self, now: float) -> None:
        self._next = now + LOG_SECONDS

    def is_due(self, now: float, at_once: bool = False) -> bool:
        """Return whether to log now; then the next time is LOG_SECONDS later."""
        if now < self._next and not at_once:
            return False
        self._next = now + LOG_SECONDS
        return True


class RetryDeadline:
    """Decides how long one request is repeated, from each failure and each answer.

    Args:
        what: Names the request in logs and errors: "push 7 to shard 1 at HOST:PORT".
        transport: Makes the request, and has the time.
        limits: Time limits, the same for many requests.
        check: Called before `limits.check`, to end this request alone.
    """

    def __init__(
        self,
        what: str,
        transport: Transport,
        limits: TimeLimits,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._what = what
        self._transport, self._clock = transport, transport.clock
        self._limits = limits
        self._check_request = check
        self._start = self._last_answer = self._attempt_start = self._clock.now()
        self._slice = 0.0
        self._log_timer = LogTimer(self._start)
        self._cause = ""  # what the request waits for, by the last answer
        self._is_silent = False  # the last attempt had no answer
        self._pause = FIRST_PAUSE_SECONDS
        # Frames that have moved in this attempt, and in the attempt with most frames.
        self._frames = self._furthest = 0

    def ask(self, row: Request[Q, A], message: Q, wait_seconds: float = 0.0) -> A:
        """Return shard 0's answer to a request.

        While no server answers, a request that may be repeated is repeated.

        wait_seconds: Longest time for which the server may hold the call.
        """
        timeout = wait_seconds + self._limits.call
        while True:
            try:
                with self.attempt():
                    answer = self._transport.request(row, message, timeout)
            except WaitTimeoutError as error:
                self.handle_wait(str(error))
            except UnreachableError as error:
                if not row.may_repeat:
                    raise
                self.handle_failure(error)
            else:
                self._last_answer = self._clock.now()
                return answer

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Context in which the request is in flight."""
        self.begin_attempt()
        try:
            yield
        finally:
            self.end_attempt()

    def begin_attempt(self) -> None:
        """Record that the request is in flight. Call `end_attempt` when the call has ended."""
        self._attempt_start, self._frames = self._clock.now(), 0
        self._limits.waits.calls += 1
        self._limits.waits.open.add(self)

    def record_frame(self) -> None:
        """Count a frame of this attempt.

        A server is not silent while an attempt moves more frames than any attempt before it.
        """
        self._frames += 1
        if self._frames > self._furthest:
            self._furthest, self._last_answer = self._frames, self._clock.now()

    def end_attempt(self) -> None:
        """Record that the attempt has ended. May be called again."""
        self._limits.waits.open.discard(self)

    def remind(self, now: float) -> None:
        """Log that the request is still in flight, if LOG_SECONDS have passed."""
        if not self._log_timer.is_due(now):
            return
        if self._cause:
            log.info("request_waiting", request=self._what, waiting_for=self._cause)
        else:
            seconds = round(now - self._attempt_start)
            log.info("request_unanswered", request=self._what, silent_seconds=seconds)

    def next_wait_seconds(self, slice_seconds: float = SLICE_SECONDS) -> float:
        """Return how many seconds the next attempt may wait for other workers.

        At most `slice_seconds`, and half of the time for which a server may be silent.
        """
        self._attempt_start = self._clock.now()
        left = min(self._start + self._limits.wait, self._limits.deadline()) - self._attempt_start
        self._slice = max(0.0, min(slice_seconds, self._limits.connect / 2, left))
        return self._slice

    def handle_failure(self, error: UnreachableError) -> None:
        """Return after a pause when a request without an answer may be repeated.

        Raises UnreachableError after too long a silence, DrainedError where the job has ended.
        """
        if error.reason == "NOT_READY":  # the server answers, so this is a wait, not silence
            self._clock.sleep(FIRST_PAUSE_SECONDS)
            return self.handle_wait(f"a server that is not ready: {error}")
        self._limits.unanswered()
        self._check()
        now = self._clock.now()
        silent, limit = now - self._last_answer, self._limits.connect
        if self._limits.hurry() and silent >= min(limit, LAST_SECONDS):
            raise DrainedError(f"the job is over, and its servers are gone: {error}") from error
        if silent >= limit:
            raise UnreachableError(f"{error} (tried for {silent:.0f} s)", error.reason) from error
        # The first failure is logged at once, but not again by another request within LOG_SECONDS.
        is_news = not self._is_silent and self._limits.waits.can_log_failure(now, self._what)
        if self._log_timer.is_due(now, at_once=is_news):
            log.info(
                "request_repeated",
                request=self._what,
                seconds_left=round(limit - silent),
                problem=str(error),
            )
        self._is_silent, self._cause = True, ""
        self._clock.sleep(min(self._pause, LONGEST_PAUSE_SECONDS))
        self._pause *= 2
        return self._check()

    def handle_wait(self, cause: str) -> None:
        """Return when a request that has to wait may be repeated, else raise WaitTimeoutError.

        cause: What the request waits for, as the answer names it.
        """
        self._check()
        now = self._last_answer = self._clock.now()
        self._pause = FIRST_PAUSE_SECONDS
        self._is_silent = False
        self._cause = cause = cause or "the others"
        if now - self._start >= self._limits.wait:
            raise WaitTimeoutError(
                f"{self._what} waited {now - self._start:.0f} s for {cause}", "WAIT_TIMEOUT"
            )
        if self._log_timer.is_due(now):
            log.info("request_waiting", request=self._what, waiting_for=cause)
        # A server that answers at once must not be flooded with requests.
        if now - self._attempt_start < min(self._slice, FIRST_PAUSE_SECONDS):
            self._clock.sleep(FIRST_PAUSE_SECONDS)

    def restart(self) -> None:
        """Count wait and silence from now: the request has made progress, or begins only now."""
        self._cause = ""
        self._start = self._last_answer = self._clock.now()

    def _check(self) -> None:
        self._check_request()
        self._limits.check()
