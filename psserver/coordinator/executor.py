"""The coordinator's desk: one request at a time, written down, and everybody's waiting for what
comes of it.

Threads. Each request has one; `changed` guards the machine, and whoever changes it wakes those
who wait, who then ask the machine again. New log entries go to this process's own shard in the
thread that made them, outside the lock, and to the other shards through their links, which wait
for them here.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

from pscommon.core.errors import PSError
from pscommon.core.log_entries import Entry
from psserver.core.commands.recorder import Recorder
from psserver.core.job.coordinator import CoordinatorMachine
from psserver.monitoring.wait_notices import RefusalNotice
from psserver.shard.engine import ShardEngine

T = TypeVar("T")

LOOK = 0.2
"""Seconds after which whoever waits looks again in any case."""

LAST_WORD = 2.0
"""Seconds for workers to hear that the job is over (they ask once a second), to end their steps
and to leave.
"""


class CommandExecutor:
    """Owner of the coordinator's machine. missing: whom all have to wait for; ending: the job
    ends; failed: told why the machine says that it has to; broken: told what keeps this
    process's own shard from following the log."""

    def __init__(
        self,
        recorder: Recorder,
        engine: ShardEngine,
        missing: Callable[[], str],
        ending: Callable[[], bool],
        failed: Callable[[PSError], None],
        broken: Callable[[Exception], None],
    ) -> None:
        self.changed = threading.Condition()
        self._recorder = recorder
        self._engine = engine
        self._missing, self._ending, self._failed, self._broken = missing, ending, failed, broken
        self._refusals = RefusalNotice()
        self._revision = 0  # of what those who wait look at

    @property
    def coordinator(self) -> CoordinatorMachine:
        return self._recorder.coordinator

    @property
    def ending(self) -> bool:
        """The job, or this server, ends."""
        return self._ending()

    def replace_recorder(self, recorder: Recorder) -> None:
        """Another machine from now on."""
        with self.changed:
            self._recorder = recorder
            self.wake()

    def do(self, name: str, quiet: bool = False, **args: Any) -> Any:
        """One command for the machine. quiet: no news to those who wait."""
        return self.step(lambda recorder, now: recorder.do(name, now, **args), quiet)

    def step(self, action: Callable[[Recorder, float], T], quiet: bool = False) -> T:
        """One event for the machine; then carry out what came of it, be it that the event was
        refused.
        """
        with ExitStack() as afterwards, self.changed:
            coordinator = self.coordinator
            before = coordinator.log.index
            try:
                return action(self._recorder, time.monotonic())
            except MemoryError as error:  # not recorded, so its effect must not be visible
                before = coordinator.log.index
                self._broken(error)
                raise
            finally:
                entries = coordinator.entries_after(before)
                afterwards.callback(self._carry_out, coordinator, coordinator.epoch, entries)
                if entries or not quiet:
                    self.wake()

    def _carry_out(
        self, coordinator: CoordinatorMachine, epoch: int, entries: Sequence[Entry]
    ) -> None:
        if entries:
            self._refusals.look(entries, time.monotonic())
            try:
                self._engine.deliver(epoch, entries)
            except Exception as bug:
                self._broken(bug)
                raise
        if coordinator.failure is not None:
            self._failed(coordinator.failure)

    def next_tick_seconds(self) -> float:
        """Seconds until time should pass again for the machine: not for long, and not beyond the
        end of a lease.
        """
        with self.changed:
            return min(LOOK, self.coordinator.roster.lease_left(time.monotonic()))

    def wake(self) -> None:
        """Let those who wait look again."""
        with self.changed:
            self._revision += 1
            self.changed.notify_all()

    def until(
        self, action: Callable[[Recorder, float], T | None], seconds: float, stopping: bool = False
    ) -> T | None:
        """The machine's answer as soon as it has one; None: not within `seconds`, or (not
        `stopping`) the job ends.
        """
        deadline, asked = time.monotonic() + seconds, False
        while True:
            # asking may change who takes part, but only the first time: those who wait must not
            # wake each other
            with self.changed:
                seen = self._revision
            answer = self.step(action, quiet=asked) if not self._missing() else None
            left, asked = deadline - time.monotonic(), True
            if answer is not None or left <= 0 or (self._ending() and not stopping):
                return answer
            with self.changed:
                self.changed.wait_for(partial(self._has_changed, seen), min(left, LOOK))

    def wait_for_workers_to_leave(self) -> None:
        """Returns once no worker is here any more, after LAST_WORD seconds at most."""
        with self.changed:
            self.changed.wait_for(lambda: not self.coordinator.roster.here(), LAST_WORD)

    def _has_changed(self, revision: int) -> bool:
        return self._revision != revision
