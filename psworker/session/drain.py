"""Drain of a worker: Ctrl-C, SIGTERM, `ps-ctl drain` or `ps-ctl stop` ask it to leave."""

import _thread
import math
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

from pscommon.core.errors import PSError
from psworker.core.clock import Clock

MAX_WAIT_SECONDS = 1.5
"""Seconds that a call still waits for others once this worker was asked to leave."""


class Stopping(SystemExit):
    """Ends the script with exit code 0: this worker was asked to leave, or the job ends.

    The loaders and the step of a job raise it after the step in progress. The worker has left
    the rounds, and other workers compute the batches that it had not pushed. The script may
    report and pull until `job.close()`. It is no Exception, so `except Exception` does not catch
    it; `finally` and `with` work as usual.

    Attributes:
        reason: Why the script ends, as text.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(0)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class DrainedError(PSError):
    """The call would delay a worker that was asked to leave, or whose job is over. Exit code 0."""

    exit_code: ClassVar[int] = 0

    def __init__(self, message: str) -> None:
        super().__init__(message, "DRAINED")


class Drain:
    """Whether this process's worker was asked to leave.

    The request belongs to the process, not to one membership: it also holds after a rejoin.

    Attributes:
        deadline: Time of the clock until which the worker waits for others; infinite until asked.
        pid: The worker's process, of which this one may be a fork.
        given_up: The servers do not answer, and get no more requests.
    """

    def __init__(self, clock: Clock, watch: Callable[[], None] | None = None) -> None:
        """watch: Runs in a thread once the worker was asked to leave."""
        self.deadline = math.inf
        self.given_up = False
        self._watch = watch
        self._renewed = self._is_finishing = False
        self._now = clock.now
        self.pid = os.getpid()

    @property
    def asked(self) -> bool:
        return self.deadline < math.inf

    def ask(self) -> None:
        """Ask the worker to leave, and set its deadline. May be called again."""
        if not self.asked:
            self.deadline = self._now() + MAX_WAIT_SECONDS
            if self._watch is not None:
                _thread.start_new_thread(self._watch, ())  # unlike Thread.start, takes no lock

    def begin(self) -> None:
        """Renew the deadline for the first call of the script after the request to leave."""
        if self.deadline < math.inf and not self._renewed:
            self._renewed, self.deadline = True, self._now() + MAX_WAIT_SECONDS

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Context of a request that the deadline does not end: it waits for no computation."""
        self._is_finishing = True
        try:
            yield
        finally:
            self._is_finishing = False

    @property
    def wait_deadline(self) -> float:
        """Time of the clock from which `check` raises."""
        return math.inf if self._is_finishing else self.deadline

    def check(self) -> None:
        """Raise DrainedError once the deadline has passed."""
        self.check_answered()
        if self._now() >= self.wait_deadline:
            raise DrainedError(
                f"asked to leave, this worker waited {MAX_WAIT_SECONDS:g} s more and now goes"
            )

    def give_up(self) -> None:
        """Record that the servers do not answer."""
        self.given_up = True

    def unanswered(self) -> None:
        """Give up after the deadline: a server did not answer a call."""
        if self._now() >= self.deadline:
            self.give_up()

    def check_answered(self) -> None:
        """Raise DrainedError once the servers have been given up."""
        if self.given_up:
            raise DrainedError(
                "asked to leave, this worker does not wait for servers that do not answer"
            )

    def opens(self) -> None:
        """Register the worker for `ask_all`."""
        _open.add(self)

    def closes(self) -> None:
        """Remove the worker from `ask_all`. May be called again."""
        _open.discard(self)


_open: "weakref.WeakSet[Drain]" = weakref.WeakSet()


def ask_all() -> bool:
    """Ask every worker of this process to leave; return whether any was not asked before.

    For signal handlers: takes no lock and writes no log.
    """
    fresh = [drain for drain in list(_open) if drain.pid == os.getpid() and not drain.asked]
    for drain in fresh:
        drain.ask()
    return bool(fresh)
