"""Executes commands on the coordinator's machine, one at a time, and lets requests wait for
results.

Threads: each request has its own thread. `changed` guards the machine. A thread that changes the
machine wakes the waiting threads, which then ask the machine again. New log entries are delivered
to this process's own shard by the thread that created them, outside the lock. The streams to the
other shards wait for new entries here.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

from pscommon.core.errors import PSError
from pscommon.core.log_entries import Entry
from psserver.core.commands.command import Command
from psserver.core.commands.recorder import Recorder
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.monitoring.wait_notices import RefusalNotice
from psserver.shard.engine import ShardEngine

T = TypeVar("T")

CHECK_INTERVAL_SECONDS = 0.2
"""Longest time between two checks by a waiting request."""

FAREWELL_SECONDS = 2.0
"""Time for workers to learn that the job is over, to end their steps and to leave.

Workers ask once a second.
"""


class CommandExecutor:
    """Owner of the coordinator's machine.

    Args:
        missing: Returns which servers the job waits for, in words; empty if all are ready.
        ending: Returns whether the job or this server ends.
        failed: Called with the error that ends the job.
        broken: Called with the error that keeps this process's own shard from following the log.
    """

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
        self._revision = 0  # increases with every change that waiting requests must see

    @property
    def coordinator(self) -> CoordinatorMachine:
        return self._recorder.coordinator

    @property
    def ending(self) -> bool:
        """Whether the job or this server ends."""
        return self._ending()

    def replace_recorder(self, recorder: Recorder) -> None:
        """Use another machine from now on."""
        with self.changed:
            self._recorder = recorder
            self.wake()

    def do(self, command: Command[T], quiet: bool = False) -> T:
        """Execute one command and return its reply.

        Args:
            quiet: Do not wake the waiting requests.
        """
        return self.step(lambda recorder, now: recorder.do(command, now), quiet)

    def step(self, action: Callable[[Recorder, float], T], quiet: bool = False) -> T:
        """Run one action on the machine, then deliver the entries that it created, even if it
        raised.
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
                afterwards.callback(self._carry_out, coordinator, coordinator.log_id, entries)
                if entries or not quiet:
                    self.wake()

    def _carry_out(
        self, coordinator: CoordinatorMachine, log_id: int, entries: Sequence[Entry]
    ) -> None:
        if entries:
            self._refusals.update(entries, time.monotonic())
            try:
                self._engine.deliver(log_id, entries)
            except Exception as bug:
                self._broken(bug)
                raise
        if coordinator.failure is not None:
            self._failed(coordinator.failure)

    def next_tick_seconds(self) -> float:
        """Return the time until the next tick: at most the check interval, and not past a lease's
        end.
        """
        with self.changed:
            return min(
                CHECK_INTERVAL_SECONDS,
                self.coordinator.membership.leases.seconds_to_end(time.monotonic()),
            )

    def wake(self) -> None:
        """Let the waiting requests ask the machine again."""
        with self.changed:
            self._revision += 1
            self.changed.notify_all()

    def until(
        self, action: Callable[[Recorder, float], T | None], seconds: float, stopping: bool = False
    ) -> T | None:
        """Repeat the action until it returns an answer.

        Args:
            stopping: Continue to wait while the job ends.

        Returns:
            The answer; None after `seconds`, or if the job ends and `stopping` is false.
        """
        deadline, asked = time.monotonic() + seconds, False
        while True:
            # only the first call may wake others: waiting requests must not wake each other
            with self.changed:
                seen = self._revision
            answer = self.step(action, quiet=asked) if not self._missing() else None
            left, asked = deadline - time.monotonic(), True
            if answer is not None or left <= 0 or (self._ending() and not stopping):
                return answer
            with self.changed:
                self.changed.wait_for(
                    partial(self._has_changed, seen), min(left, CHECK_INTERVAL_SECONDS)
                )

    def wait_for_workers_to_leave(self) -> None:
        """Wait until no worker is left, at most FAREWELL_SECONDS."""
        with self.changed:
            self.changed.wait_for(
                lambda: not self.coordinator.membership.current(), FAREWELL_SECONDS
            )

    def _has_changed(self, revision: int) -> bool:
        return self._revision != revision
