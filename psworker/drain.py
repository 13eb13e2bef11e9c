"""Leaving when asked (SIGTERM, ps-ctl drain): at the next step boundary, and done."""

import math
import os
import weakref
from typing import TYPE_CHECKING, ClassVar

from pscommon.core.errors import PSError

if TYPE_CHECKING:
    from psworker.patience import Clock

LONGEST_WAIT = 5.0
"""Seconds that a worker which was asked to leave still waits for others."""


class DrainedError(PSError):
    """This worker was asked to leave, or the job is over, and what was called would keep it here. Exit code 0."""

    exit_code: ClassVar[int] = 0

    def __init__(self, message: str) -> None:
        super().__init__(message, "DRAINED")


class Drain:
    """Whether this process's worker was asked to leave. deadline: by the clock, until when it still waits for others.

    It belongs to the process, not to one place in the job: a worker that joins again has still been asked.
    """

    def __init__(self, clock: "Clock") -> None:
        self.deadline = math.inf
        self._now = clock.now
        self._pid = os.getpid()

    @property
    def asked(self) -> bool:
        return self.deadline < math.inf

    def ask(self) -> None:
        """Harmless to repeat."""
        if not self.asked:
            self.deadline = self._now() + LONGEST_WAIT

    def check(self) -> None:
        """DrainedError once it has waited long enough."""
        if self._now() >= self.deadline:
            raise DrainedError(f"asked to leave, this worker waited {LONGEST_WAIT:g} s more and now goes")

    def opens(self) -> None:
        """There is a worker that can be asked."""
        _open.add(self)

    def closes(self) -> None:
        """The worker is gone. Harmless to repeat."""
        _open.discard(self)

    def here(self) -> bool:
        """False in a fork of the worker's process."""
        return self._pid == os.getpid()


_open: "weakref.WeakSet[Drain]" = weakref.WeakSet()


def ask_all() -> bool:
    """Asks every worker of this process. False: there is none, or all of them had been asked before.

    For signal handlers: takes no lock and writes no log.
    """
    fresh = [drain for drain in list(_open) if drain.here() and not drain.asked]
    for drain in fresh:
        drain.ask()
    return bool(fresh)
