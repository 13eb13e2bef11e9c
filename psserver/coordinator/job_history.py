"""How a job's log begins: new, from a snapshot, or from the coordinator's write-ahead log; and
rollbacks.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from pscommon.core.errors import PSError, SnapshotError, UnreachableError
from pscommon.core.model_spec import model_to_json
from pscommon.snapshot import Manifest
from pscommon.wal.log import LogDamagedError
from psserver.coordinator.executor import CommandExecutor
from psserver.coordinator.server_registry import ServerRegistry
from psserver.core.commands.recorder import RecordedCommand, Recorder
from psserver.core.job.coordinator import CoordinatorMachine
from psserver.core.job.policy import policy
from psserver.core.job.settings import JobRules
from psserver.core.workers.membership import GENERATION
from psserver.durability.best_effort_log import BestEffortLog
from psserver.durability.coordinator_log import (
    CoordinatorLog,
    check_begins,
    check_goes_on,
    check_nothing_more,
    is_before,
    report_unusable,
)
from psserver.durability.record_sink import RecordSink, RecordSource, StandbyLink, disk_log
from psserver.durability.shard_log import folder_of, logged_version
from psserver.durability.shard_state import LogUnfitError
from psserver.durability.snapshots import SnapshotManager
from psserver.process.config import ServerConfig
from psserver.process.identity import ServerIdentity
from psserver.process.metrics import ServerMetrics
from psserver.replication.standby_state import Promotion
from psserver.shard.engine import ShardEngine

log = logging.getLogger("psserver")

LOG_ID_BITS = 62

LOG_FOLDER = "log-job"
"""Folder of the coordinator's write-ahead log in the data directory."""


class JobHistory:
    """Begins logs on shard 0.

    Args:
        fail: Called with the error that ends the job.

    Attributes:
        replace_recorder: Called with the recorder of a new log; the caller guarantees exclusive
            access.
        newest: The newest snapshot of the current log; None without one.
        durable: The coordinator writes a write-ahead log.
    """

    def __init__(
        self,
        config: ServerConfig,
        identity: ServerIdentity,
        engine: ShardEngine,
        snapshots: SnapshotManager,
        registry: ServerRegistry,
        metrics: ServerMetrics,
        fail: Callable[[PSError], None],
        standby_link: StandbyLink | None = None,
    ) -> None:
        self._config, self._identity, self._engine, self._snapshots = (
            config,
            identity,
            engine,
            snapshots,
        )
        self._registry, self._metrics, self._fail, self._standby_link = (
            registry,
            metrics,
            fail,
            standby_link,
        )
        self._rollback_lock = threading.RLock()
        self._coordinator: CoordinatorMachine | None = None  # of the current log
        self._recovered = False  # another process began the current log
        self._accounted_version: int | None = (
            None  # losses up to this version are counted; None: none is lost
        )
        self._unusable_log_version = 0  # last version of a log that could not be used
        self._rules = config.rules()
        self.replace_recorder: Callable[[Recorder], None] = lambda recorder: None
        self.newest: Manifest | None = None
        disk = disk_log(config, LOG_FOLDER, metrics.log_failed)
        self.durable = disk is not None
        self.journal = CoordinatorLog(RecordSink(RecordSource.JOB, disk, standby_link))

    def new_recorder(
        self,
        epoch: int | None = None,
        generation: int | None = None,
        shards: int | None = None,
        rules: JobRules | None = None,
    ) -> Recorder:
        """Return a recorder with an empty machine.

        Args:
            epoch, generation, shards, rules: Values of a log that is replayed; None: the current
                ones.
        """
        number = secrets.randbits(LOG_ID_BITS) if epoch is None else epoch
        start = self._snapshots.generation if generation is None else generation
        coordinator = CoordinatorMachine(
            shards or self._registry.shards, rules or self._rules, start, number
        )
        return Recorder(coordinator, self.journal)

    # ---- starting --------------------------------------------------------------------------------

    def start(self) -> None:
        """Continue from the log, from the requested snapshot, or begin a new job."""
        manifest = self._snapshots.to_resume(self._config.resume)
        if self.durable and self._config.resume == "auto" and self._recover(manifest):
            return
        if not self.durable:
            self._remove_log(manifest)
        if manifest is None:
            self._registry.layout.forget()
            self._learn(None)
            self.begin()
        else:
            self._learn(manifest.job)
            self._accounted_version = max(manifest.version, self._unusable_log_version)
            self.resume(manifest)

    def install_promotion(self, promotion: Promotion) -> None:
        """Continue as the coordinator that this process replicated as a standby; the shards
        reconnect.
        """
        standby_state, coordinator = promotion.standby_state, promotion.standby_state.coordinator
        assert coordinator is not None
        first, self.newest = standby_state.snapshots
        self._registry.form(coordinator.members)
        self._registry.new_log(first)
        self._snapshots.count_on(
            max(standby_state.hello["generation"], coordinator.membership.generation) + 1
        )
        recorder = Recorder(coordinator, self.journal)
        self._begin_journal(coordinator, coordinator.version, coordinator.whole())
        self._take_over(recorder)
        self._recovered = True
        recorder.recovered(time.monotonic(), self._snapshots.generation, promotion.whole)
        written = (
            []
            if promotion.whole
            else [snapshot["version"] for snapshot in self._snapshots.listing()]
        )
        if max(written, default=0) > coordinator.version or not coordinator.log.can_go_on(
            self._engine.make_report()
        ):
            self.go_back(
                "the standby lacks the end of its primary's log",
                coordinator.epoch,
                coordinator.version,
            )

    @contextmanager
    def paused(self, executor: CommandExecutor) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield the first record for a standby and the coordinator's state, which does not change
        meanwhile.

        Raises:
            UnreachableError: A reshard is in progress (NOT_READY).
        """
        with executor.changed:
            if executor.coordinator.move is not None:
                raise UnreachableError("the job is being resharded", "NOT_READY")
            model = executor.coordinator.model
            yield (
                self._hello(),
                executor.coordinator.whole() | {"model": model_to_json(model) if model else None},
            )

    def _hello(self) -> dict[str, Any]:
        snapshots = [
            manifest.as_json() if manifest else None
            for manifest in (self._registry.snapshot, self.newest)
        ]
        layout = self._registry.layout.noted
        return {"generation": self._snapshots.generation, "snapshots": snapshots, "layout": layout}

    def begin(self) -> None:
        """Begin a job without earlier state."""
        self._recovered = False
        recorder = self.new_recorder()
        if self._coordinator is not None:
            recorder.coordinator.policy = self._coordinator.policy
        self._registry.form(self._registry.shards)
        self._registry.new_log(None)
        self._begin_journal(recorder.coordinator, 0)
        self._take_over(recorder)
        self._engine.begin_log(recorder.coordinator.epoch, 0, self._registry.shards)
        self._engine.request_report()

    def _take_over(self, recorder: Recorder) -> None:
        self._coordinator = recorder.coordinator
        self.replace_recorder(recorder)

    def _begin_journal(
        self, coordinator: CoordinatorMachine, version: int, state: dict[str, Any] | None = None
    ) -> None:
        self.journal.clear()
        state = state or {
            "epoch": coordinator.epoch,
            "version": version,
            "generation": self._snapshots.generation,
            "policy": [*coordinator.policy_args()],
            "rules": coordinator.rules.as_json(),
        }
        self.journal.begin(version, self._with_job(state))

    def resume(self, manifest: Manifest, count: Callable[[], None] | None = None) -> None:
        """Use a snapshot as the state of the job; workers join later, shards are asked to load
        it.

        Args:
            count: Counts this start of the log before anything changes; None: count even if the
                disk refuses.
        """
        with self._rollback_lock:
            (count or self._snapshots.count_on)()
            self._snapshots.goes_on_from(manifest)
            self._recovered = False
            recorder = self.new_recorder()
            recorder.coordinator.restore(
                manifest.coordinator, manifest.model, time.monotonic(), self._coordinator
            )
            recorder.coordinator.ledger.origin = self._snapshots.named(manifest)
            self._registry.form(self._registry.shards)
            self._registry.new_log(manifest)
            self.newest = manifest
            self._begin_journal(
                recorder.coordinator, manifest.version, recorder.coordinator.whole()
            )
            self._take_over(recorder)
            log.info("resuming", extra={"version": manifest.version})
            problem = self._snapshots.load_into(
                self._engine, recorder.coordinator.epoch, manifest, self._registry.shards
            )
            self.loaded(0, manifest.version, problem)
        self._engine.request_report()

    def loaded(self, shard: int, version: int, problem: str) -> None:
        """Record that a shard has loaded the snapshot; if it could not, roll back to the previous
        one.
        """
        with self._rollback_lock:
            wanted = self._registry.snapshot
            if not problem or wanted is None or version != wanted.version:
                return
            extra = {"version": version, "problem": problem}
            log.error("a snapshot cannot be loaded; trying the previous one", extra=extra)
            older = self._snapshots.before(version)
            if older is None:
                self._fail(SnapshotError(f"no snapshot can be loaded: shard {shard}: {problem}"))
            else:
                self.resume(older)

    def restore(self, version: int) -> None:
        """Roll all shards back to this snapshot, on request.

        Raises:
            SnapshotError: The snapshot does not exist or is damaged.
        """
        with self._rollback_lock:
            manifest = self._snapshots.exactly(version)
            log.warning("going back to a snapshot, as asked", extra={"version": version})
            if self._coordinator is not None:
                self._accounted_version = self._coordinator.version  # discarded on request
            self.resume(manifest, self._snapshots.next_generation)

    def go_back(self, why: str, epoch: int, version: int) -> None:
        """Roll all shards back to the newest snapshot because a shard lost its state.

        Without a snapshot the job ends. A job that continued from its log begins again instead. A
        call for an earlier log is ignored: another shard may have reported the loss before.

        Args:
            why: What happened, for people.
            epoch: The log at the time of the loss.
            version: The version at the time of the loss.
        """
        with self._rollback_lock:
            if self._coordinator is None or epoch != self._coordinator.epoch:
                return
            manifest = self._snapshots.newest()
            if manifest is None and self._recovered:
                log.error(
                    "the job begins again: there is no snapshot",
                    extra={"why": why, "updates_lost": version},
                )
                self._metrics.updates_lost(version)
                self._snapshots.count_on()
                self.begin()
            elif manifest is None:
                self._fail(
                    SnapshotError(f"{why} and there is no snapshot to go back to", "NO_SNAPSHOT")
                )
            else:
                lost = version - manifest.version
                self._metrics.updates_lost(lost)
                extra = {"why": why, "version": manifest.version, "updates_lost": lost}
                log.error("rolling back to a snapshot", extra=extra)
                self._accounted_version = version
                self.resume(manifest)

    def count_lost_updates(self, worker: int, version: int) -> None:
        """Count lost updates if a leaving worker knows a newer version than the restored
        snapshot.

        A restarted coordinator cannot know this loss otherwise.
        """
        with self._rollback_lock:
            if self._accounted_version is None or worker > self._snapshots.generation * GENERATION:
                return
            lost = version - self._accounted_version
            if lost > 0:
                self._accounted_version = version
                self._metrics.updates_lost(lost)
                extra = {"worker": worker, "version": version, "updates_lost": lost}
                log.error(
                    "a worker reports a newer version than the restored snapshot", extra=extra
                )

    def commit_snapshot(self, coordinator: CoordinatorMachine, executor: CommandExecutor) -> bool:
        """Commit the finished snapshot if its log is current; return whether there is one."""
        with self._rollback_lock:
            finished, model = coordinator.cuts.finished, coordinator.model
            if coordinator is self._coordinator and finished is not None and model is not None:
                manifest = self._snapshots.commit(finished, self._identity.job, model)
                if manifest is not None:
                    self._written(manifest, executor)
                return manifest is not None
        return False

    def _written(self, manifest: Manifest, executor: CommandExecutor) -> None:
        """Record a new snapshot and drop the log before it.

        The standby learns it before any shard drops its log: after a failover it must know what
        shards continue from.
        """
        with executor.changed:
            self.newest = manifest
            if self._standby_link is not None:
                self._standby_link.snapshot(manifest.as_json())
        self._snapshots.prune()
        self._engine.retire_log(manifest.version)
        self.journal.retire(manifest.version)

    # ---- the log ---------------------------------------------------------------------------------

    def _recover(self, manifest: Manifest | None) -> bool:
        """Continue from the write-ahead log; return False if there is none or it cannot be used."""
        try:
            recorder = self._replayed(
                self.journal.since(manifest.version if manifest else None), manifest
            )
            if recorder is not None:
                self._install_shard_count(recorder.coordinator, manifest)
        except LogUnfitError as error:
            return self._report_unusable(str(error), manifest)
        if recorder is None:
            return self._report_unusable("", manifest)
        coordinator = recorder.coordinator
        possible = {
            coordinator.shards,
            *([coordinator.move.before] if coordinator.move is not None else []),
        }
        problem = self._snapshots.recover_into(self._engine, coordinator.epoch, manifest, possible)
        if not problem and not coordinator.log.can_go_on(self._engine.make_report()):
            shard = self._engine.shard
            problem = f"shard {shard}'s log and the job's do not match: one of them lacks its end"
        if problem:
            return self._report_unusable(problem, manifest, coordinator.version)
        if manifest is not None:
            self._snapshots.goes_on_from(manifest)
        self._registry.form(coordinator.members)
        self._registry.new_log(manifest)
        self._learn(None)
        self.newest = manifest
        self._take_over(recorder)
        self._recovered = True
        self.journal.begin(coordinator.version, self._with_job(coordinator.whole()))
        recorder.recovered(time.monotonic(), self._snapshots.generation, resumes=True)
        coordinator.ledger.origin = self._snapshots.named(manifest, logged=True)
        recorder.do("go_by", time.monotonic(), rules=self._rules.as_json())
        coordinator.membership.begin_run(self._config.min_workers)
        log.info("continued from the log", extra={"version": coordinator.version})
        return True

    def _report_unusable(
        self, problem: str, manifest: Manifest | None, reached: int = 0
    ) -> Literal[False]:
        """Report that the job cannot continue from its log, and how many updates that costs.

        problem: empty where the coordinator's log holds nothing since the snapshot.
        reached: the version at which that log ends.
        """
        assert self._config.data_dir is not None
        saved = manifest.version if manifest else 0
        reached = max(reached, logged_version(folder_of(self._config.data_dir, 0)))
        if problem or reached > saved:
            report_unusable(problem, self._config.data_dir / LOG_FOLDER, saved, reached)
            self._metrics.updates_lost(max(0, reached - saved))
            self._unusable_log_version = reached
        return False

    def _install_shard_count(
        self, coordinator: CoordinatorMachine, manifest: Manifest | None
    ) -> None:
        """Use the number of shards of the log, if this server may have been started for it."""
        layout, wrote = self._registry.layout, coordinator.shards
        if wrote not in (layout.shards, layout.given, *layout.past):
            remedy = f"start {wrote} servers, and then use ps-ctl reshard --servers {layout.shards}"
            check_nothing_more(coordinator.version, manifest, f"a log of {wrote} servers", remedy)
            raise LogUnfitError(f"{wrote} servers wrote it, and there are {layout.shards} now")
        layout.change(wrote)

    def _remove_log(self, manifest: Manifest | None) -> None:
        """Remove the log of an earlier start with --durability log.

        All its updates must be in a snapshot.
        """
        if (data_dir := self._config.data_dir) is None:
            return
        folders = (data_dir / LOG_FOLDER, folder_of(data_dir, 0))
        logs = [BestEffortLog(folder, "no", self._metrics.log_failed) for folder in folders]
        try:
            if self._config.resume == "auto":
                self._check_removable(
                    CoordinatorLog(RecordSink(RecordSource.JOB, logs[0])), manifest
                )
            for each in logs:
                each.clear()
        finally:
            for each in logs:
                each.close()

    def _check_removable(self, past: CoordinatorLog, manifest: Manifest | None) -> None:
        try:
            recorder = self._replayed(past.since(manifest.version if manifest else None), manifest)
        except LogUnfitError as error:
            self._report_unusable(str(error), manifest)
            return
        if recorder is None:
            self._report_unusable("", manifest)
        else:
            remedy = (
                "start the servers with --durability log; "
                "ps-ctl stop ends them with a snapshot of all"
            )
            check_nothing_more(
                recorder.coordinator.version, manifest, "the log of an earlier start", remedy
            )

    def _replayed(
        self, notes: Iterator[dict[str, Any] | RecordedCommand], manifest: Manifest | None
    ) -> Recorder | None:
        recorder: Recorder | None = None
        try:
            for note in notes:
                if recorder is None and manifest is not None and is_before(note, manifest):
                    continue
                if recorder is None:
                    recorder = self._from_base(note, manifest)
                elif isinstance(note, RecordedCommand):
                    CoordinatorLog.replay(recorder.coordinator, note)
                else:
                    check_goes_on(note, recorder.coordinator)
        except (LogDamagedError, OSError, KeyError, ValueError, TypeError) as error:
            raise LogUnfitError(str(error)) from error
        return recorder

    def _from_base(
        self, note: dict[str, Any] | RecordedCommand, manifest: Manifest | None
    ) -> Recorder:
        check_begins(note, manifest)
        assert not isinstance(note, RecordedCommand)
        rules = JobRules.from_json(note["rules"])
        recorder = self.new_recorder(note["epoch"], note.get("generation"), note["shards"], rules)
        recorder.coordinator.policy = policy(*note["policy"])
        if "log" in note:
            assert manifest is not None
            recorder.coordinator.become(note, manifest.model, time.monotonic(), manifest.index)
        self._learn(note.get("job") or (manifest.job if manifest else None))
        return recorder

    def _with_job(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the first entry of a log segment."""
        return {"shards": self._registry.shards, **state, "job": self._identity.job}

    def _learn(self, job: str | None) -> None:
        """Set the name of the job; the command line takes precedence."""
        registry = self._registry
        self._identity.learn(
            self._config.job or job or self._identity.job,
            registry.addresses,
            registry.layout.changes,
        )

    def close(self) -> None:
        self.journal.close()
