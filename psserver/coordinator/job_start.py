"""How a job starts: new, from its logs, from a snapshot, or as a promoted standby; and rollbacks,
after which it starts again.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from pscommon.core.errors import PSError, SnapshotError, UnreachableError
from pscommon.core.limits import WORKERS_PER_GENERATION
from pscommon.core.metric_row import MetricRow
from pscommon.core.model_spec import model_to_json
from pscommon.snapshot import Manifest
from pscommon.telemetry.logs import get_logger
from psserver.coordinator.executor import CommandExecutor
from psserver.core.commands.job_commands import UseRules
from psserver.core.commands.recorder import Recorder
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.trainings import Trainings
from psserver.core.servers.catch_up import promotion_needs_rollback
from psserver.core.servers.shard_directory import ShardDirectory
from psserver.durability.coordinator_log import LOG_FOLDER, CoordinatorLog
from psserver.durability.job_recovery import InitialState, JobRecovery, Origin
from psserver.durability.record_sink import StandbyLink, disk_log
from psserver.durability.shard_recovery import ShardStateFactory
from psserver.durability.snapshots import SnapshotManager
from psserver.process.config import ServerConfig
from psserver.process.identity import ServerIdentity
from psserver.process.job_files import ShardCountFile, TrainingsFile
from psserver.process.metrics import ServerMetrics
from psserver.replication.hello import CoordinatorFacts
from psserver.replication.standby_state import Promotion
from psserver.shard.engine import ShardEngine

log = get_logger(__name__)

LOG_ID_BITS = 62


class JobStart:
    """Starts the job on shard 0, and rolls it back.

    Args:
        is_ending: Returns whether the job or this server ends.
        fail: Called with the error that ends the job.
        broken: Called with the error that keeps this process's own shard from following the log.

    Attributes:
        executor: Executes commands on the machine of the current log.
        newest: The newest snapshot of the current log; None without one.
        first_version, first_rows: Version and reported values with which the current log began;
            None before the first log.
        durable: The coordinator writes a write-ahead log.
    """

    def __init__(
        self,
        config: ServerConfig,
        identity: ServerIdentity,
        engine: ShardEngine,
        states: ShardStateFactory,
        snapshots: SnapshotManager,
        directory: ShardDirectory[Manifest],
        shard_count: ShardCountFile,
        metrics: ServerMetrics,
        is_ending: Callable[[], bool],
        fail: Callable[[PSError], None],
        broken: Callable[[Exception], None],
        standby_link: StandbyLink | None = None,
    ) -> None:
        self._config, self._identity = config, identity
        self._engine, self._states, self._snapshots = engine, states, snapshots
        self._directory, self._shard_count, self._metrics = directory, shard_count, metrics
        self._fail, self._standby_link = fail, standby_link
        self._generations = snapshots.generations
        self._rollback_lock = threading.RLock()
        self._coordinator: CoordinatorMachine | None = None  # of the current log
        self._is_recovered = False  # another process began the current log
        # losses up to this version are counted; None: none is lost
        self._accounted_version: int | None = None
        self._rules = config.rules()
        self._trainings = TrainingsFile(config.data_dir)
        self.newest: Manifest | None = None
        self.first_version: int | None = None
        self.first_rows: Sequence[MetricRow] = ()
        disk = disk_log(config, LOG_FOLDER, metrics.count_log_failure)
        self.durable = disk is not None
        self.journal = CoordinatorLog(disk, standby_link)
        recorder = Recorder(self._new_machine(), self.journal)
        self.executor = CommandExecutor(
            recorder, engine, lambda: directory.missing, is_ending, fail, broken
        )

    def _new_machine(self) -> CoordinatorMachine:
        generation, log_id = self._generations.number, secrets.randbits(LOG_ID_BITS)
        return CoordinatorMachine(self._directory.shards, self._rules, generation, log_id)

    # ---- starting --------------------------------------------------------------------------------

    def start(self) -> None:
        """Continue from the log, from the requested snapshot, or begin a new job."""
        manifest = self._snapshots.choose_start(self._config.resume)
        recovery = self._make_recovery()
        is_auto, generation = self._config.resume == "auto", self._generations.number
        if recovery is not None and self.durable and is_auto:
            initial = recovery.recover(self.journal, manifest, generation)
            if initial is not None:
                return self._continue(initial)
        elif recovery is not None and not self.durable:
            recovery.remove_logs(manifest, generation, checks=is_auto)
        if manifest is None:
            self._shard_count.forget()
            self._learn("")
            self.begin(self._trainings.read(forget=self._config.resume == "never"))
        else:
            self._learn(manifest.job)
            unusable = recovery.unusable_version if recovery is not None else 0
            self._accounted_version = max(manifest.version, unusable)
            self.resume(manifest)
        return None

    def _make_recovery(self) -> JobRecovery | None:
        """Return what recovers the job from its logs; None without a data directory."""
        if (data_dir := self._config.data_dir) is None:
            return None
        lost, failed = self._metrics.count_lost_updates, self._metrics.count_log_failure
        return JobRecovery(data_dir, self._states, self._shard_count, lost, failed)

    def install(self, initial: InitialState) -> Recorder:
        """Begin a log with this state. Return the recorder of its machine.

        No command and no report of a shard is processed meanwhile: a shard would count as following
        the new log because of a report on the old one.
        """
        recorder = self.executor.replace_recorder(partial(self._begin_log, initial))
        if initial.shard is not None:
            self._engine.install(initial.shard, continues_log=initial.origin is Origin.LOG)
        return recorder

    def _begin_log(self, initial: InitialState) -> Recorder:
        coordinator = initial.coordinator
        self._directory.form(coordinator.job.following_shards)
        self._directory.new_log(initial.snapshot)
        if initial.job:
            self._learn(initial.job)
        self.newest, self._is_recovered = initial.newest, initial.is_recovered
        if initial.origin is not Origin.LOG:
            self.journal.clear()
        first = initial.first_record(
            self._directory.shards, self._generations.number, self._identity.job
        )
        self.journal.begin_segment(coordinator.job.version, first)
        self._coordinator = coordinator
        self.first_version = coordinator.job.version
        self.first_rows = coordinator.reported.latest_rows()
        return Recorder(coordinator, self.journal)

    def _continue(self, initial: InitialState) -> None:
        """Continue from the state before a crash."""
        coordinator, manifest = initial.coordinator, initial.snapshot
        if manifest is not None:
            self._snapshots.continue_from(manifest)
        recorder = self.install(initial)
        recorder.recovered(time.monotonic(), self._generations.number, resumes=True)
        coordinator.ledger.origin = self._snapshots.describe(manifest, logged=True)
        recorder.do(UseRules(self._rules), time.monotonic())
        coordinator.membership.departed.begin_next_run(self._config.min_workers)
        log.info("resumed_from_log", version=coordinator.job.version)

    def install_promotion(self, promotion: Promotion) -> None:
        """Continue as the coordinator that this process replicated; the shards reconnect."""
        standby_state, coordinator = promotion.standby_state, promotion.standby_state.coordinator
        assert coordinator is not None
        facts = standby_state.hello.facts
        assert facts is not None
        self._generations.count_in_running_job(
            max(facts.generation, coordinator.membership.generation) + 1
        )
        recorder = self.install(
            InitialState(
                Origin.PROMOTION,
                coordinator,
                snapshot=facts.snapshot,
                newest=standby_state.newest,
            )
        )
        recorder.recovered(time.monotonic(), self._generations.number, promotion.is_complete)
        listing = [] if promotion.is_complete else self._snapshots.listing()
        written = [snapshot["version"] for snapshot in listing]
        if promotion_needs_rollback(
            coordinator, self._engine.make_report(), max(written, default=0)
        ):
            self.go_back(
                "the standby lacks the end of its primary's log",
                coordinator.job.log_id,
                coordinator.job.version,
            )

    def begin(self, trainings: Trainings) -> None:
        """Begin a training without earlier state.

        The policy and the values that scripts have reported stay.
        """
        coordinator, shards = self._new_machine(), self._directory.shards
        coordinator.job.trainings = trainings
        if self._coordinator is not None:
            coordinator.job.policy = self._coordinator.job.policy
            coordinator.reported.recover(self._coordinator.reported.state())
        shard = self._states.fresh(coordinator.job.log_id, 0, shards)
        self.install(InitialState(Origin.FRESH, coordinator, shard))
        self._engine.coordinator.request_report()

    def begin_training(self, name: str) -> None:
        """Begin the next training, unless the job has gone on since the caller looked at it."""
        with self._rollback_lock:
            before = self._coordinator
            if before is None or before.membership.current() or before.job.trainings.admits(name):
                return
            trainings = before.job.trainings.followed_by(name)
            self._trainings.store(trainings)
            self._snapshots.begin_training()
            self._generations.count_in_running_job()
            self._accounted_version = None
            self.begin(trainings)
        log.info("training_began", training=name, after=before.job.trainings.current)

    def resume(self, manifest: Manifest, count: Callable[[], None] | None = None) -> None:
        """Use a snapshot as the state of the job; workers join later, shards load it.

        count: Counts this start of the log before anything changes; None: count even if the disk
            refuses.
        """
        with self._rollback_lock:
            (count or self._generations.count_in_running_job)()
            self._snapshots.continue_from(manifest)
            coordinator = self._new_machine()
            coordinator.restore(
                manifest.coordinator, manifest.model, time.monotonic(), self._coordinator
            )
            coordinator.ledger.origin = self._snapshots.describe(manifest)
            self.install(
                InitialState(Origin.SNAPSHOT, coordinator, snapshot=manifest, newest=manifest)
            )
            log.info("resumed_from_snapshot", version=manifest.version)
            # after the others have been asked: all shards load at the same time
            self.loaded(0, manifest.version, self._load(coordinator.job.log_id, manifest))
        self._engine.coordinator.request_report()

    def _load(self, log_id: int, manifest: Manifest) -> str:
        """Load a snapshot into this process's own shard. Return a problem, or an empty string."""
        try:
            state = self._states.from_snapshot(log_id, manifest, self._directory.shards)
        except SnapshotError as error:
            return str(error)
        self._engine.install(state)
        return ""

    # ---- standbys --------------------------------------------------------------------------------

    @contextmanager
    def paused(self) -> Iterator[tuple[CoordinatorFacts, dict[str, Any]]]:
        """Yield facts for a standby and the coordinator's state, which does not change meanwhile.

        Raises UnreachableError (NOT_READY) during a reshard.
        """
        with self.executor.changed:
            coordinator = self.executor.coordinator
            if coordinator.job.reshard is not None:
                raise UnreachableError("the job is being resharded", "NOT_READY")
            model, snapshot = coordinator.job.model, self._directory.snapshot
            facts = CoordinatorFacts(
                self._generations.number, snapshot, self.newest, self._shard_count.stored_values
            )
            state = coordinator.complete_state()
            yield facts, state | {"model": model_to_json(model) if model else None}
            # the other shards must know the standby's address before it may take over
            self.executor.wake()

    # ---- rollback --------------------------------------------------------------------------------

    def loaded(self, shard: int, version: int, problem: str) -> None:
        """Record that a shard has loaded the snapshot, or roll back to the previous one."""
        with self._rollback_lock:
            wanted = self._directory.snapshot
            if not problem or wanted is None or version != wanted.version:
                return
            log.error("snapshot_unloadable", version=version, failed_shard=shard, problem=problem)
            older = self._snapshots.find_before(version)
            if older is None:
                self._fail(
                    SnapshotError(
                        f"no snapshot can be loaded: shard {shard}: {problem}. Try: start shard "
                        f"{shard} with its old data directory, or all servers with `--resume never`"
                    )
                )
            else:
                self.resume(older)

    def refused(self, problem: str) -> None:
        """End a new job that a shard has refused to begin."""
        self._fail(SnapshotError(problem))

    def restore(self, version: int) -> None:
        """Roll all shards back to this snapshot, on request.

        Raises SnapshotError if the snapshot does not exist or is damaged.
        """
        with self._rollback_lock:
            manifest = self._snapshots.find(version)
            log.warning("rollback_requested", version=version)
            if self._coordinator is not None:
                self._accounted_version = self._coordinator.job.version  # discarded on request
            self.resume(manifest, self._generations.count)

    def go_back(self, why: str, log_id: int, version: int) -> None:
        """Roll all shards back to the newest snapshot because a shard lost its state.

        Without a snapshot the job ends. A job that continued from its log begins again instead. A
        call for an earlier log is ignored: another shard may have reported the loss before.

        why: What happened, for people.
        log_id, version: Those at the time of the loss.
        """
        with self._rollback_lock:
            if self._coordinator is None or log_id != self._coordinator.job.log_id:
                return
            manifest = self._snapshots.find_newest()
            if manifest is None and self._is_recovered:
                log.error("job_restarted_without_snapshot", reason=why, updates_lost=version)
                self._metrics.count_lost_updates(version)
                self._generations.count_in_running_job()
                self.begin(self._coordinator.job.trainings)
            elif manifest is None:
                self._fail(
                    SnapshotError(f"{why} and there is no snapshot to go back to", "NO_SNAPSHOT")
                )
            else:
                lost = version - manifest.version
                self._metrics.count_lost_updates(lost)
                log.error(
                    "rollback_started", reason=why, version=manifest.version, updates_lost=lost
                )
                self._accounted_version = version
                self.resume(manifest)

    def count_lost_updates(self, worker: int, version: int) -> None:
        """Count lost updates if a leaving worker knows a newer version than the restored
        snapshot.

        A restarted coordinator cannot know this loss otherwise.
        """
        with self._rollback_lock:
            accounted = self._accounted_version
            if accounted is None or worker > self._generations.number * WORKERS_PER_GENERATION:
                return
            if (lost := version - accounted) > 0:
                self._accounted_version = version
                self._metrics.count_lost_updates(lost)
                log.error("updates_lost", worker=worker, version=version, updates_lost=lost)

    def commit_snapshot(self, coordinator: CoordinatorMachine) -> bool:
        """Commit the finished snapshot if its log is current; return whether there is one."""
        with self._rollback_lock:
            finished, model = coordinator.cuts.finished, coordinator.job.model
            if coordinator is self._coordinator and finished is not None and model is not None:
                manifest = self._snapshots.commit(finished, self._identity.job, model)
                if manifest is not None:
                    self._written(manifest)
                return manifest is not None
        return False

    def _written(self, manifest: Manifest) -> None:
        """Record a new snapshot and drop the log before it.

        The standby learns it before any shard drops its log: after a failover it must know what
        shards continue from.
        """
        with self.executor.changed:
            self.newest = manifest
            if self._standby_link is not None:
                self._standby_link.announce_snapshot(manifest.as_json())
        self._snapshots.prune()
        self._engine.log.remove_before(manifest.version)
        self.journal.remove_before(manifest.version)

    def _learn(self, job: str) -> None:
        """Set the name of the job; the command line takes precedence."""
        name = self._config.job or job or self._identity.job
        self._identity.learn(name, self._directory.addresses, self._shard_count.changes)
