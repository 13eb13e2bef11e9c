"""Snapshots of the job on shard 0: requested, committed when all parts are written, restored."""

from pscommon.core.errors import SnapshotError, UnreachableError, WaitTimeoutError
from pscommon.snapshot import Manifest
from psserver.coordinator.executor import CommandExecutor
from psserver.coordinator.job_start import JobStart
from psserver.core.commands.recorder import Recorder
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.servers.shard_directory import ShardDirectory
from psserver.core.servers.shard_protocol import finish_snapshot
from psserver.durability.snapshots import SnapshotManager

LAST_SNAPSHOT_SECONDS = 30.0
"""Time that the end of a job waits for its last snapshot."""

LAST_SNAPSHOT_ATTEMPTS, RETRY_PAUSE_SECONDS = 5, 2.0
"""Attempts at the last snapshot, and the pause between them: each attempt writes the whole model.
"""


class SnapshotScheduler:
    """Takes the snapshots that commands, the schedule and the end of a job ask for.

    Attributes:
        wanted: Take a snapshot as soon as possible: the disks lack state that a server which took
            over needs.
    """

    def __init__(
        self,
        executor: CommandExecutor,
        history: JobStart,
        snapshots: SnapshotManager,
        directory: ShardDirectory[Manifest],
    ) -> None:
        self.wanted = False
        self._executor, self._history = executor, history
        self._snapshots, self._directory = snapshots, directory

    def save(self, seconds: float) -> int:
        """Take a snapshot of the current version, or a later one; return its version.

        Raises SnapshotError if the servers have no data directory, or writing failed;
        UnreachableError if there is nothing to save yet, or the servers stop; WaitTimeoutError if
        there is no snapshot after `seconds`.
        """
        if not self._snapshots.enabled:
            raise SnapshotError("these servers have no --data-dir", "NO_SNAPSHOT")
        wanted = self._executor.wait(
            lambda r, now: r.coordinator.job.version if r.coordinator.job.begun else None, seconds
        )
        if wanted is None:
            raise UnreachableError(
                "there is nothing to save yet: the job waits for "
                f"{self._directory.missing or 'the first weights'}",
                "NOT_READY",
            )
        version = self._written(wanted, seconds)
        if version is None and self._executor.is_ending():
            raise UnreachableError(
                "cannot save: the servers are stopping, and take a last snapshot if possible",
                "STOPPING",
            )
        if version is None:
            raise WaitTimeoutError(
                f"no snapshot after {seconds:.0f} s: {self._snapshots.problem or 'still writing'}"
            )
        return version

    def restore(self, version: int, seconds: float) -> None:
        """Roll all shards back to the snapshot of this version; workers rejoin by themselves."""
        self._history.restore(version)
        done = self._executor.wait(lambda recorder, now: True, seconds)
        taken = self._directory.snapshot
        if taken is None or taken.version != version:
            raise SnapshotError(
                f"snapshot {version} cannot be loaded by every shard (see the servers' logs)"
            )
        if not done:
            missing = self._directory.missing
            why = f"the job waits for {missing}" if missing else "the job ends"
            raise WaitTimeoutError(f"snapshot {version} is not loaded after {seconds:.0f} s: {why}")

    @property
    def coordinator(self) -> CoordinatorMachine:
        return self._executor.coordinator

    @property
    def is_logged(self) -> bool:
        """Whether the logs of the job and of all shards hold every update since the newest
        snapshot.
        """
        has_log = self._history.durable and not self._history.journal.is_broken
        return has_log and all(server.logs and not server.log_broken for server in self._directory)

    def last(self) -> str:
        """Write the last snapshot of a job; return why it is missing, empty if it is written."""
        self._snapshots.logs_failures = False  # the caller reports it with the outcome
        version, seconds = self.coordinator.job.version, LAST_SNAPSHOT_SECONDS
        try:
            written = self._written(version, seconds, LAST_SNAPSHOT_ATTEMPTS)
        except SnapshotError as error:
            return str(error)
        return "" if written is not None else f"no snapshot was written within {seconds:g} s"

    def advance(self) -> None:
        """Commit a finished snapshot, take a wanted one, and repair broken logs with a new one.

        Called at every tick.
        """
        self._finish()
        self.wanted = self._snapshots.enabled and (self.wanted or self._is_done)
        if self.wanted and not self._directory.missing and not self._executor.coordinator.cuts.busy:
            self.wanted = False
            with self._executor.step() as (recorder, now):
                recorder.cut(now)
        if self._history.journal.is_broken or any(server.log_broken for server in self._directory):
            with self._executor.step() as (recorder, now):
                recorder.mend(now)

    @property
    def _is_done(self) -> bool:
        """Whether all workers have left and updates are in no snapshot.

        No worker would repeat these updates.
        """
        coordinator = self._executor.coordinator
        new = coordinator.job.begun and coordinator.job.version > coordinator.cuts.last_version
        return new and coordinator.membership.departed.is_run_done(1)

    def _finish(self) -> None:
        """Commit the snapshot whose parts are all written; only then may the next one start."""
        coordinator = self._executor.coordinator
        if coordinator.cuts.finished is not None:
            written = self._history.commit_snapshot(coordinator)
            has_logs = self._history.durable
            with self._executor.step() as (recorder, now):
                finish_snapshot(recorder, now, written, has_logs)

    def _written(self, wanted: int, seconds: float, tries: int = 1) -> int | None:
        """Take snapshots until one holds the wanted version (after a rollback: the current one).

        tries: Attempts before SnapshotError. Commands try once and may be repeated; the end of a
            job cannot.

        Returns the version of the snapshot; None if there is none after `seconds`.
        """
        before, failures, again = self._snapshots.failures, 0, 0.0

        def written(recorder: Recorder, now: float) -> int | None:
            nonlocal failures, again
            newest = self._snapshots.newest_version
            if newest is not None and newest >= min(wanted, recorder.coordinator.job.version):
                return newest
            if self._snapshots.failures - before > failures:
                failures, again = self._snapshots.failures - before, now + RETRY_PAUSE_SECONDS
            if failures >= tries:
                raise SnapshotError(f"the snapshot failed: {self._snapshots.problem}")
            if now >= again:
                recorder.cut(now)
            return None

        return self._executor.wait(written, seconds, stopping=tries > 1)
