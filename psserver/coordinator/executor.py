"""Executes commands on the coordinator's machine, one at a time, and lets requests wait for
results.

Threads: `changed` guards the machine. A thread that changes the machine wakes the waiting requests,
which then ask the machine again. A worker that waits for data or in a collective call is woken only
by what concerns it. New log entries are delivered to this process's own shard by the thread that
created them, outside the lock. The streams to the other shards wait for new entries here.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TypeVar

from pscommon.core.errors import PSError
from pscommon.core.log_entries import Entry, Evict
from psserver.core.commands.command import Command
from psserver.core.commands.recorder import Recorder
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.monitoring.wait_notices import RefusalNotice
from psserver.shard.engine import ShardEngine
from psserver.waiting import Registrations, ThreadWaiter, Waiter, run, until

T = TypeVar("T")

CHECK_INTERVAL_SECONDS = 0.2
"""Longest time between two checks by a waiting request."""


class CommandExecutor:
    """Owner of the coordinator's machine.

    Args:
        missing: Returns which servers the job waits for, in words; empty if all are ready.
        is_ending: As the attribute.
        failed: Called with the error that ends the job.
        broken: Called with the error that keeps this process's own shard from following the log.

    Attributes:
        is_ending: Returns whether the job or this server ends.
        revision: Increases with every change that waiting requests must see.
    """

    def __init__(
        self,
        recorder: Recorder,
        engine: ShardEngine,
        missing: Callable[[], str],
        is_ending: Callable[[], bool],
        failed: Callable[[PSError], None],
        broken: Callable[[Exception], None],
    ) -> None:
        self.changed = threading.RLock()
        self._registrations = Registrations[int | None](self.changed)
        self._recorder = recorder
        self._engine = engine
        self._missing, self.is_ending = missing, is_ending
        self._failed, self._broken = failed, broken
        self._refusals = RefusalNotice()
        self._announcements: list[Callable[[], object]] = []
        self.revision = 0
        self._all_woken_at = 0  # revision
        self._woken_at: dict[int, int] = {}  # revision by worker

    @property
    def coordinator(self) -> CoordinatorMachine:
        return self._recorder.coordinator

    def replace_recorder(self, begin: Callable[[], Recorder]) -> Recorder:
        """Use another machine from now on. No command is executed while `begin` creates it."""
        with self.changed:
            self._recorder = begin()
            self.wake()
            return self._recorder

    def do(self, command: Command[T], quiet: bool = False) -> T:
        """Execute one command and return its reply.

        Args:
            quiet: Wake only workers that this command answers, and other requests if there are new
                log entries. Wake all if there is news about data.
        """
        with self.step(quiet) as (recorder, now):
            return recorder.do(command, now)

    @contextmanager
    def step(self, quiet: bool = False) -> Iterator[tuple[Recorder, float]]:
        """Let the block change the machine, then deliver the entries that it created, even if it
        raised.

        Args:
            quiet: As in `do`.

        Yields:
            The recorder of the machine, and the time.
        """
        entries: list[Entry] = []
        try:
            with self.changed:
                recorder = self._recorder
                coordinator = recorder.coordinator
                log, ledger = coordinator.log, coordinator.ledger
                before, data_news = log.index, ledger.news
                try:
                    yield recorder, time.monotonic()
                except MemoryError as error:  # not recorded, so its effect must not be visible
                    before = log.index
                    self._broken(error)
                    raise
                finally:
                    entries = log.after(before)
                    answered = coordinator.membership.index.answered
                    if not quiet or ledger.news != data_news or Evict in map(type, entries):
                        self.wake()
                    elif entries or answered:
                        self._wake(answered)
                    answered.clear()
        finally:
            if entries:
                self._deliver(coordinator.job.log_id, entries)
            if coordinator.job.failure is not None:
                self._failed(coordinator.job.failure)

    def _deliver(self, log_id: int, entries: list[Entry]) -> None:
        for announce in list(self._announcements):
            announce()
        self._refusals.update(entries, time.monotonic())
        try:
            self._engine.deliver(log_id, entries)
        except Exception as bug:
            self._broken(bug)
            raise

    @contextmanager
    def announcing(self, announce: Callable[[], object]) -> Iterator[None]:
        """Call `announce` at new log entries, until the block ends.

        Args:
            announce: Sends entries to another shard before this process's own shard carries them
                out. Must not wait.
        """
        self._announcements.append(announce)
        try:
            yield
        finally:
            self._announcements.remove(announce)

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
            self._all_woken_at = self.revision + 1
            self._woken_at.clear()
            self._wake([worker for worker in self._registrations.keys if worker is not None])

    def _wake(self, workers: Iterable[int]) -> None:
        """Wake all requests, but of those that wait for data or in a collective call only those of
        `workers`.
        """
        self.revision += 1
        self._woken_at.update(dict.fromkeys(workers, self.revision))
        self._registrations.wake([None, *workers])

    async def until(
        self,
        action: Callable[[Recorder, float], T | None],
        seconds: float,
        waiter: Waiter,
        stopping: bool = False,
        worker: int | None = None,
    ) -> T | None:
        """Carry out the action, again after each change, until it returns an answer.

        Args:
            stopping: Continue to wait while the job ends.
            worker: The worker for which the action asks for data, or for the result of a collective
                call. Such requests, and later tries of others, must not wake each other.

        Returns:
            The answer; None after `seconds`, if the waiter is over, or if the job ends and
            `stopping` is false.
        """
        deadline, quiet = time.monotonic() + seconds, worker is not None

        def attempt() -> T | None:
            with self.step(quiet) as (recorder, now):
                return action(recorder, now)

        while True:
            seen, answer = self.revision, None
            if not self._missing():
                answer = attempt() if waiter.may_act_here else await waiter.do(attempt)
            left, quiet = deadline - time.monotonic(), True
            is_over = waiter.is_over or (self.is_ending() and not stopping)
            if answer is not None or left <= 0 or is_over:
                return answer
            if not self._waits_for_itself(worker):
                left = min(left, CHECK_INTERVAL_SECONDS)
            await until(
                partial(self._has_news, worker, seen),
                partial(self.watch, worker),
                left,
                waiter,
            )

    def wait(
        self,
        action: Callable[[Recorder, float], T | None],
        seconds: float,
        stopping: bool = False,
    ) -> T | None:
        """Do in this thread what `until` does."""
        return run(self.until(action, seconds, ThreadWaiter(), stopping))

    def watch(self, worker: int | None, wake: Callable[[], None]) -> AbstractContextManager[None]:
        """Call `wake` whenever a request should ask again, until the block ends.

        Args:
            worker: As in `until`.
            wake: Must not wait; runs with the lock.
        """
        with self.changed:
            key = worker if self._waits_for_itself(worker) else None
        return self._registrations.watch(key, wake)

    def watch_all(self, wake: Callable[[], None]) -> AbstractContextManager[None]:
        """Call `wake` at each call of `CommandExecutor.wake`: anything may have changed.

        Args:
            wake: As in `watch`.
        """
        return self._registrations.watch(0, wake)  # the number of no worker

    def _waits_for_itself(self, worker: int | None) -> bool:
        """Return whether the machine knows what the worker waits for, and says when it is there."""
        job = self.coordinator.job
        member = job.membership.members.get(worker or 0)
        return member is not None and (
            member.waiting is not None or job.collectives.is_waiting(member.worker)
        )

    def wait_until(self, done: Callable[[], bool], seconds: float) -> None:
        """Wait in this thread until `done` returns True, at most this time."""
        run(until(lambda: done() or None, partial(self.watch, None), seconds, ThreadWaiter()))

    def _has_news(self, worker: int | None, revision: int) -> bool | None:
        """Return True if a request of this worker should ask again: it did so at `revision`."""
        with self.changed:
            if worker is None or not self._waits_for_itself(worker):
                return self.revision != revision or None
            return max(self._all_woken_at, self._woken_at.get(worker, 0)) > revision or None
