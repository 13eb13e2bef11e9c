"""Snapshots of the job, on shard 0: cut, made whole when all parts are written, gone back to."""

import logging

from pscommon.core.errors import SnapshotError, UnreachableError, WaitTimeoutError
from psserver.coordinator.executor import CommandExecutor
from psserver.coordinator.job_history import JobHistory
from psserver.coordinator.server_registry import ServerRegistry
from psserver.core.commands.recorder import Recorder
from psserver.core.job.coordinator import CoordinatorMachine
from psserver.durability.snapshots import SnapshotManager

LAST = 30.0
"""Seconds that the end of a job waits for its last snapshot."""

TRIES, PAUSE = 5, 2.0
"""How often that is tried, and seconds between two tries: each copies and writes the whole
model.
"""

log = logging.getLogger("psserver")


class SnapshotScheduler:
    """What people, the clock and the end of a job want of them. Waits at the coordinator's desk.

    wanted: as soon as can be, for what the disks hold is not enough for a server that has taken
    over.
    """

    def __init__(
        self,
        executor: CommandExecutor,
        history: JobHistory,
        snapshots: SnapshotManager,
        registry: ServerRegistry,
    ) -> None:
        self.wanted = False
        self._executor, self._history, self._snapshots, self._registry = (
            executor,
            history,
            snapshots,
            registry,
        )

    def save(self, seconds: float) -> int:
        """A snapshot of the version that stands, written everywhere; its version."""
        if not self._snapshots.enabled:
            raise SnapshotError("these servers have no --data-dir", "NO_SNAPSHOT")
        wanted = self._executor.until(
            lambda r, now: r.coordinator.version if r.coordinator.begun else None, seconds
        )
        if wanted is None:
            raise UnreachableError(
                f"nothing to save yet: {self._registry.missing or 'no weights have come'}",
                "NOT_READY",
            )
        version = self._written(wanted, seconds)
        if version is None and self._executor.ending:
            raise UnreachableError(
                "the servers are stopping, with a last snapshot where there can be one", "STOPPING"
            )
        if version is None:
            raise WaitTimeoutError(
                f"no snapshot after {seconds:.0f} s: {self._snapshots.problem or 'still writing'}"
            )
        return version

    def restore(self, version: int, seconds: float) -> None:
        """All shards go back to the snapshot of this version; workers join again by themselves."""
        self._history.restore(version)
        done = self._executor.until(lambda recorder, now: True, seconds)
        taken = self._registry.snapshot
        if taken is None or taken.version != version:
            raise SnapshotError(
                f"snapshot {version} cannot be loaded by every shard (see the servers' logs)"
            )
        if not done:
            raise WaitTimeoutError(
                f"not every shard has loaded it: {self._registry.missing or 'the job ends'}"
            )

    @property
    def coordinator(self) -> CoordinatorMachine:
        return self._executor.coordinator

    @property
    def is_logged(self) -> bool:
        """Do the logs of the job and of all shards hold every update since the newest snapshot?"""
        whole = self._history.durable and not self._history.journal.broken
        return whole and all(server.logs and not server.log_broken for server in self._registry)

    def last(self) -> str:
        """As the job ends; returns why the version that stands is in no snapshot, or nothing."""
        self._snapshots.tells = False  # that is told with what comes of it
        try:
            written = self._written(self.coordinator.version, LAST, TRIES)
        except SnapshotError as error:
            return str(error)
        return "" if written is not None else f"no snapshot was written within {LAST:g} s"

    def look(self) -> None:
        """Now and then: finish one that is written, cut one that is wanted, mend logs that are
        broken with one.
        """
        self._finish()
        self.wanted = self._snapshots.enabled and (self.wanted or self._is_done)
        if self.wanted and not self._registry.missing and not self._executor.coordinator.cuts.busy:
            self.wanted = False
            self._executor.step(lambda recorder, now: recorder.cut(now))
        if self._history.journal.broken or any(server.log_broken for server in self._registry):
            self._executor.step(lambda recorder, now: recorder.mend(now))

    @property
    def _is_done(self) -> bool:
        """All workers have left, done, with updates that are in no snapshot: nobody would do
        them again.
        """
        coordinator = self._executor.coordinator
        new = coordinator.begun and coordinator.version > coordinator.cuts.last_version
        return new and coordinator.roster.all_done(1)

    def _finish(self) -> None:
        """Where all parts are there, the manifest makes them a snapshot; only then may the next
        one be cut.
        """
        coordinator = self._executor.coordinator
        if coordinator.cuts.finished is not None:
            written = self._history.file(coordinator, self._executor)
            self._executor.do("filed")
            if coordinator.move is not None and (written or not self._history.durable):
                self._executor.do("settle")  # without a log, the snapshot of before will do

    def _written(self, wanted: int, seconds: float, tries: int = 1) -> int | None:
        """Cut until there is a snapshot of this version (less, if all go back); its version, or
        None: not in time.

        SnapshotError where it could not be written so often. One try is for people, who may ask
        again; more are for the end of the job, when nobody is there who would.
        """
        before, failures, again = self._snapshots.failures, 0, 0.0

        def written(recorder: Recorder, now: float) -> int | None:
            nonlocal failures, again
            newest = self._snapshots.newest_version
            if newest is not None and newest >= min(wanted, recorder.coordinator.version):
                return newest
            if self._snapshots.failures - before > failures:
                failures, again = self._snapshots.failures - before, now + PAUSE
            if failures >= tries:
                raise SnapshotError(f"the snapshot failed: {self._snapshots.problem}")
            if now >= again:
                recorder.cut(now)
            return None

        return self._executor.until(written, seconds, stopping=tries > 1)
