"""How long one request may go on: repeating it while nobody answers, waiting while somebody else
is late.
"""

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from pscommon.core.errors import UnreachableError, WaitTimeoutError
from psworker.core.clock import Clock
from psworker.session.drain import DrainedError

LOG_SECONDS = 8.0  # nobody waits for 10 without a line that says for whom
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 0.25
# once the job is known to end, servers that do not answer are not coming back
LAST_SECONDS = 2.0

T = TypeVar("T")

log = logging.getLogger("psworker")


class PendingRequests:
    """Requests that are with a server now. The heartbeat thread logs those that take long.

    calls: how many there have been, with other calls of the script (`touch`).
    """

    def __init__(self) -> None:
        self.calls = 0
        self._open: set[RetryDeadline] = set()
        self._said: dict[str, float] = {}
        self._saying = threading.Lock()

    def are_news(self, now: float, what: str) -> bool:
        """That such a request fails: not if it was said within LOG_SECONDS, of one that is made
        again by now.
        """
        with self._saying:
            self._said = {
                each: then for each, then in self._said.items() if now - then < LOG_SECONDS
            }
            return self._said.setdefault(what, now) == now

    @property
    def any(self) -> bool:
        """Is there one?"""
        return bool(self._open)

    def touch(self) -> None:
        """The script has made a call, be it without a request."""
        self.calls += 1

    def begin(self, patience: "RetryDeadline") -> None:
        self.calls += 1
        self._open.add(patience)

    def end(self, patience: "RetryDeadline") -> None:
        """Harmless to repeat."""
        self._open.discard(patience)

    def remind(self, now: float) -> None:
        for patience in list(self._open):
            patience.remind(now)


@dataclass(frozen=True)
class TimeLimits:
    """Seconds: connect, of continuous silence of a server; wait, for what others have to do.

    check is called before every repetition and raises if there is no point in going on; hurry
    says that the job ends. deadline: by the clock, when check will raise. unanswered: called
    before check where a server did not answer.
    """

    connect: float
    wait: float
    check: Callable[[], None] = lambda: None
    unanswered: Callable[[], None] = lambda: None
    hurry: Callable[[], bool] = lambda: False
    deadline: Callable[[], float] = lambda: math.inf
    waits: PendingRequests = field(default_factory=PendingRequests)


class WaitLogger:
    """Logs what is waited for, every LOG_SECONDS, not before the first are over."""

    def __init__(self, now: float) -> None:
        self._next = now + LOG_SECONDS

    def say(self, now: float, text: str) -> None:
        if now >= self._next:
            self.tell(now, text)

    def tell(self, now: float, text: str) -> None:
        """At once."""
        log.info(text)
        self._next = now + LOG_SECONDS


class RetryDeadline:
    """For one request, named by `what`: "push 7 to shard 1 at HOST:PORT". Tell it every failure
    and every answer.
    """

    def __init__(self, what: str, clock: Clock, limits: TimeLimits) -> None:
        self._what = what
        self._clock = clock
        self._limits = limits
        self._started = self._heard = self._asked = clock.now()
        self._slice = 0.0
        self._announcer = WaitLogger(self._started)
        self._whom = ""  # is waited for, as far as the last answer goes
        self._silent = False  # the last attempt had no answer
        self._pause = FIRST_PAUSE
        self._frames = self._furthest = (
            0  # that have moved: of this attempt, of the one that came furthest
        )

    def ask(self, call: Callable[[], T]) -> T:
        """The answer of `call`, which is repeated while nobody answers."""
        while True:
            try:
                answer = self.once(call)
            except WaitTimeoutError as error:
                self.waited(str(error))
            except UnreachableError as error:
                self.failed(error)
            else:
                self._heard = self._clock.now()
                return answer

    def once(self, call: Callable[[], T]) -> T:
        """The answer of `call`, or its error."""
        self.asked()
        try:
            return call()
        finally:
            self.answered()

    def asked(self) -> None:
        """A server has the request now. Call `answered` when it comes back, with or without an
        answer.
        """
        self._asked, self._frames = self._clock.now(), 0
        self._limits.waits.begin(self)

    def moved(self) -> None:
        """One more frame of this attempt. A server that takes or gives more than it ever did is
        not silent.
        """
        self._frames += 1
        if self._frames > self._furthest:
            self._furthest, self._heard = self._frames, self._clock.now()

    def answered(self) -> None:
        """Harmless to repeat."""
        self._limits.waits.end(self)

    def remind(self, now: float) -> None:
        """The server still has it."""
        silent = f"{self._what}: no answer for {now - self._asked:.0f} s"
        self._announcer.say(now, f"{self._what} waits for {self._whom}" if self._whom else silent)

    def left(self, slice_seconds: float) -> float:
        """How long the attempt that is now made may wait for others: at most a slice, and half a
        server's silence.
        """
        self._asked = self._clock.now()
        left = min(self._started + self._limits.wait, self._limits.deadline()) - self._asked
        self._slice = max(0.0, min(slice_seconds, self._limits.connect / 2, left))
        return self._slice

    def failed(self, error: UnreachableError) -> None:
        """No answer. Returns after a pause when the request may be repeated, else raises
        UnreachableError; DrainedError where no server is to answer any more."""
        if error.reason == "NOT_READY":  # it does answer: this is a wait, not silence
            self._clock.sleep(FIRST_PAUSE)
            return self.waited(f"a server that is not ready: {error}")
        self._limits.unanswered()
        self._limits.check()
        now = self._clock.now()
        silent, limit = now - self._heard, self._limits.connect
        if self._limits.hurry() and silent >= min(limit, LAST_SECONDS):
            raise DrainedError(f"the job is over, and its servers are gone: {error}") from error
        if silent >= limit:
            raise UnreachableError(f"{error} (tried for {silent:.0f} s)", error.reason) from error
        text = f"{self._what}: trying again for {limit - silent:.0f} s: {error}"
        if not self._silent and self._limits.waits.are_news(
            now, self._what
        ):  # nobody has to wait for that
            self._announcer.tell(now, text)
        else:
            self._announcer.say(now, text)
        self._silent, self._whom = True, ""
        self._clock.sleep(min(self._pause, LONGEST_PAUSE))
        self._pause *= 2
        return self._limits.check()

    def waited(self, whom: str) -> None:
        """An answer: not yet. Returns when the request may be repeated, else raises
        WaitTimeoutError naming `whom`.
        """
        self._limits.check()
        now = self._heard = self._clock.now()
        self._pause = FIRST_PAUSE
        self._silent = False
        self._whom = whom = whom or "the others"
        if now - self._started >= self._limits.wait:
            raise WaitTimeoutError(
                f"{self._what} waited {now - self._started:.0f} s for {whom}", "WAIT_TIMEOUT"
            )
        self._announcer.say(now, f"{self._what} waits for {whom}")
        if now - self._asked < min(
            self._slice, FIRST_PAUSE
        ):  # a server that does not wait is not to be flooded
            self._clock.sleep(FIRST_PAUSE)

    def progress(self) -> None:
        """What is waited for has come nearer, or begins only now: wait and silence count from
        now.
        """
        self._whom = ""
        self._started = self._heard = self._clock.now()
