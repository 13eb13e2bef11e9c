"""The job on shard 0: what workers, shards and commands ask of the coordinator, and its clock."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pscommon.core.errors import MismatchError, PSError, UnreachableError
from pscommon.core.limits import ALLREDUCE
from pscommon.core.partition import PartitionPlan
from pscommon.snapshot import Manifest
from pscommon.telemetry.logs import get_logger
from pscommon.telemetry.recent_events import RecentEvents
from psserver.coordinator.final_state import save_final_state
from psserver.coordinator.job_start import JobStart
from psserver.coordinator.resharding import ReshardRequests
from psserver.coordinator.shard_connections import ShardConnections
from psserver.coordinator.snapshot_jobs import SnapshotScheduler
from psserver.core.commands.job_commands import PolicySettings, SetPolicy, WantWorkers
from psserver.core.commands.waiting import waiting_for
from psserver.core.commands.worker_commands import DrainWorker
from psserver.core.coordinator.admission import check_switch
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.snapshot_schedule import PartReport
from psserver.core.job.worker_scaling import WorkerScaling
from psserver.core.servers.shard_directory import ShardDirectory
from psserver.durability.record_sink import StandbyLink
from psserver.durability.shard_recovery import ShardStateFactory
from psserver.durability.snapshots import SnapshotManager
from psserver.monitoring.pass_progress import PassProgress
from psserver.monitoring.tracing import Tracing
from psserver.monitoring.training_curves import CurveWriter, JobSample, sample_job
from psserver.monitoring.wait_notices import FirstWorkers
from psserver.monitoring.worker_monitor import WorkerMonitor, find_conditions
from psserver.peers.link_messages import statistics
from psserver.process.config import ServerConfig
from psserver.process.identity import ServerIdentity
from psserver.process.job_files import ShardCountFile
from psserver.process.metrics import ServerMetrics
from psserver.process.worker_exits import WorkerExits
from psserver.replication.standby_state import Promotion
from psserver.shard.engine import REPORT_INTERVAL_SECONDS, Coordinator, ShardEngine

END_SECONDS = 2.0
"""Time for the other shards to learn that the job is over."""

FAREWELL_SECONDS = 2.0
"""Time for workers to learn that the job is over, to end their steps and to leave.

Workers ask once a second.
"""

UPLOAD_SECONDS = 30.0
"""Further time for a worker to upload weights that the servers lack (policy allreduce)."""

log = get_logger(__name__)


class CoordinatorService:
    """The coordinator of a job. All methods may be called from any thread.

    Args:
        make_engine: Returns this process's own shard, which asks the coordinator that it is given.
        lost_data_dir: Why this server continues without its --data-dir; empty otherwise.

    Attributes:
        executor: Every change of the machine goes through it.
        history: Begins the job and its trainings, and keeps the journal.
        first_workers: Checks the wait for --min-workers.
        began_at: When this server started, in monotonic seconds.
        events: The newest log events of this process, while it is attached.
        page: URL of the live page; None without one.
        tracing: The spans of all processes, while someone asks for them.
    """

    page: str | None = None

    def __init__(
        self,
        config: ServerConfig,
        shard_count: ShardCountFile,
        identity: ServerIdentity,
        make_engine: Callable[[Coordinator], ShardEngine],
        states: ShardStateFactory,
        snapshots: SnapshotManager,
        metrics: ServerMetrics,
        standby_link: StandbyLink | None = None,
        lost_data_dir: str = "",
    ) -> None:
        self.config, self.snapshots, self.metrics = config, snapshots, metrics
        self.engine = make_engine(self)
        metrics.show_goodput(self.engine.traffic.goodput.shares)
        self.directory = ShardDirectory[Manifest](shard_count, identity.address, standby_link)
        self._identity, self._standby_link = identity, standby_link
        self.worker_keys, self._lost_data_dir = identity.worker_keys, lost_data_dir
        self.began_at = self._reported_at = time.monotonic()
        self.stop_reason: str | None = None  # why this server stops
        self.is_over = False  # the job ends with this server
        self.failure: PSError | None = None  # the error that ended the job
        self.not_saved = ""  # what of the final state is not saved, and why
        self.stopped = threading.Event()  # the final state is saved, or cannot be saved
        self.history = JobStart(
            config,
            identity,
            self.engine,
            states,
            snapshots,
            self.directory,
            shard_count,
            metrics,
            lambda: self.stop_reason is not None,
            self._fail,
            self._broken,
            standby_link,
        )
        self.executor = self.history.executor
        self.progress, self.events, self.tracing = PassProgress(), RecentEvents(), Tracing()
        self.snapshot_scheduler = SnapshotScheduler(
            self.executor, self.history, snapshots, self.directory
        )
        self.reshard_requests = ReshardRequests(
            self.executor, self.directory, shard_count, self.engine, snapshots, identity, config
        )
        self.shard_connections = ShardConnections(
            self.executor,
            self.directory,
            self.history,
            snapshots,
            self.snapshot_scheduler,
            self.reshard_requests,
            self.stopped,
        )
        self.first_workers = FirstWorkers(config.join_timeout, lambda: self.waiting_for)
        self._worker_monitor = WorkerMonitor(metrics, config.on_worker_loss.seconds)
        self.worker_exits, self._scaling = WorkerExits(), config.make_scaling()
        self._curves: CurveWriter | None = None
        self._ticker = threading.Thread(target=self._tick_forever, name="ticker", daemon=True)

    def start(self, ticking: bool = True, promotion: Promotion | None = None) -> None:
        """Continue the job or begin one, then start the clock.

        ticking: Start the clock; a simulation calls `tick` itself.
        promotion: The state that this process replicated as a standby.
        """
        if promotion is not None:
            self.history.install_promotion(promotion)
            self.snapshot_scheduler.wanted = True
        else:
            self.history.start()
            if (job := self._coordinator.job).begun:
                self.snapshots.resumed = {
                    "version": job.version,
                    "steps": job.counts["applied"],
                    "samples": job.samples,
                }
        coordinator = self._coordinator
        self.engine.deliver(coordinator.job.log_id, coordinator.log.after(0))
        self._report_all()
        if ticking:
            self._ticker.start()
            if self.config.tensorboard is not None:
                self._curves = CurveWriter(self.config.tensorboard, self._sample_curves)
                self._curves.start()

    def _report_all(self) -> None:
        """Make a complete report of this process's own shard."""
        self._reported_at = time.monotonic()
        self.shard_connections.report(self.engine.make_report())

    # ---- asked by this process's own shard (psserver.shard.engine.Coordinator) ------------------

    def request_report(self) -> None:
        """Make a report of what is new in this process's own shard."""
        self.shard_connections.report(self.engine.make_report(only_new=self.directory[0].ready))

    def record_part(self, part: PartReport) -> None:
        self.shard_connections.record_part(0, part)

    def describe_wait(self) -> str:
        self.first_workers.check()
        return self.waiting_for

    @property
    def _coordinator(self) -> CoordinatorMachine:
        return self.executor.coordinator

    @property
    def job(self) -> str:
        return self._identity.job

    @property
    def waiting_for(self) -> str:
        """What the job waits for now, in words; empty if it waits for nothing."""
        with self.executor.changed:
            waiting = self.directory.missing or self.reshard_requests.waiting_for
            return waiting or waiting_for(self._coordinator, time.monotonic())

    def groups(self) -> Sequence[Mapping[str, Any]]:
        """Return the current hyper-parameters of all parameter groups of the model."""
        store = self.engine.live.state.store
        return store.groups() if store is not None else ()

    def _sample_curves(self) -> JobSample | None:
        """Return what TensorBoard shows of the job now; None before its log has begun."""
        groups = self.groups()
        with self.executor.changed:
            first, rows = self.history.first_version, self.history.first_rows
            if first is None:
                return None
            return sample_job(self._coordinator, first, rows, groups)

    # ---- the job ---------------------------------------------------------------------------------

    @property
    def policy(self) -> str:
        return self._coordinator.job.policy.name

    def passes_begun(self) -> Mapping[str, tuple[int, list[int]]]:
        """Return the passes that have begun, see PassNumbers.begun."""
        with self.executor.changed:
            return self._coordinator.ledger.passes.begun()

    def check_goes_on(self) -> None:
        """Raise UnreachableError once this server begins to stop."""
        if self.stop_reason is not None:
            raise UnreachableError(f"shard 0 is stopping: {self.stop_reason}", "STOPPING")

    def check_running(self) -> None:
        """Raise UnreachableError once this server ends while its job continues."""
        if self.stopped.is_set() and not self.is_over:
            reason = self.stop_reason or "its process ends"
            raise UnreachableError(f"shard 0 is stopping: {reason}", "STOPPING")

    def check_job(self, job: str) -> None:
        if job and job != self.job:
            raise MismatchError(
                f"these servers run job {self.job}, not {job}. Try: the servers of {job}; if shard "
                "0 has lost its data directory, start it with the old one",
                "JOB_MISMATCH",
            )

    def renew_leases(self, ages: Mapping[int, float]) -> None:
        """Renew leases from the last transfer; `ages` has the seconds since then by worker."""
        with self.executor.step(quiet=True) as (recorder, now):
            recorder.coordinator.membership.leases.renew_by_transfers(ages, now)

    def drain(self, worker: int) -> None:
        """Ask a worker to leave at its next step boundary."""
        self.executor.do(DrainWorker(worker))
        log.info("worker_drain_requested", worker=worker)

    def set_policy(self, name: str, staleness: int | None, max_staleness: int | None) -> None:
        """Use another policy from the next update on."""
        policy = self.config.make_policy(name, staleness, max_staleness)
        with self.executor.step() as (recorder, _):
            check_switch(recorder.coordinator, policy, self.config.in_flight)
        self.executor.do(SetPolicy(PolicySettings(name, staleness, max_staleness, policy.backup)))
        log.info("policy_changed", policy=name, staleness=staleness, max_staleness=max_staleness)

    def want_workers(self, workers: int, reason: str) -> None:
        """Set the number of workers that whatever places workers is to follow."""
        self.executor.do(WantWorkers(workers, reason))
        log.info("workers_wanted", workers=workers, reason=reason)

    def _scale(self, scaling: WorkerScaling) -> None:
        with self.executor.step(quiet=True) as (recorder, now):
            decision = recorder.scale(scaling, now)
        if decision is not None:
            log.info("workers_wanted", workers=decision.wanted, reason=decision.reason)

    @property
    def wants_weights(self) -> bool:
        """Whether a worker waits for weights that only workers in other requests have."""
        job = self._coordinator.job
        return job.policy.name == ALLREDUCE and job.reduction.wants_weights(job.version)

    @property
    def begun(self) -> bool:
        """Whether every shard has weights."""
        return self._coordinator.job.begun and not self.directory.missing

    @property
    def version(self) -> int:
        return self._coordinator.job.version

    @property
    def plan(self) -> PartitionPlan:
        if self._coordinator.job.model is None:
            raise UnreachableError("no worker has registered a model yet", "NOT_READY")
        return PartitionPlan(self._coordinator.job.model, self._coordinator.job.shards)

    def restore(self, version: int, seconds: float) -> None:
        """Roll all shards back to the snapshot of this version; workers rejoin by themselves."""
        self.check_goes_on()
        self.snapshot_scheduler.restore(version, seconds)

    def _fail(self, error: PSError) -> None:
        self.failure = self.failure or error
        self.stop(str(error))

    def _broken(self, bug: Exception) -> None:
        """End this process without a snapshot: its state may be wrong."""
        log.error("coordinator_failed", exc_info=bug)
        self.failure, self.is_over = PSError(f"a bug: {bug!r}"), True
        self.stopped.set()

    # ---- time ------------------------------------------------------------------------------------

    def _tick_forever(self) -> None:
        try:
            # at once: the machine needs a first time to notice that this process was paused
            self.tick()
            while not self.stopped.wait(self.executor.next_tick_seconds()):
                self.tick()
        except Exception as bug:
            self._broken(bug)

    def tick(self) -> None:
        self.first_workers.update(self._coordinator)
        if time.monotonic() - self._reported_at >= REPORT_INTERVAL_SECONDS:
            self._report_all()
        if alive := self.engine.traffic.statistics.take_active_workers():
            self.renew_leases(alive)
        with self.executor.step(quiet=True) as (recorder, now):
            workers = recorder.coordinator.membership.current_workers()
            lost = recorder.tick(now, self.worker_exits.among(workers))
        self._worker_monitor.log_lost(lost)
        with self.executor.changed:
            now, coordinator = time.monotonic(), self._coordinator
            found = find_conditions(coordinator, now)
            self.progress.update(coordinator, now)
            waits = self.directory.missing or (
                coordinator.membership.current() and self.waiting_for
            )
        self._worker_monitor.update(coordinator, found, waits or "", now)
        if self._scaling is not None and self.stop_reason is None:
            self._scale(self._scaling)
        self.snapshot_scheduler.advance()
        self.reshard_requests.advance()
        self.tracing.tick()
        self.directory[0].stats = statistics(self.engine, self._standby_link)
        if self.config.exit_when_done and self._coordinator.membership.departed.is_run_done(
            self.config.min_workers
        ):
            self.stop("all workers are done; --exit-when-done ends the job after one training")

    def stop(self, reason: str, ends_job: bool = True) -> None:
        """Begin to stop this server, with a last snapshot if one is possible. Returns at once.

        ends_job: The job ends as well: first its workers leave, then all servers stop. Otherwise
            the job waits for this server to return.
        """
        with self.executor.changed:
            self.is_over = self.is_over or ends_job
            if self.stop_reason is not None:
                return
            self.stop_reason = reason or "asked to"
            self.executor.wake()
        log.info("server_stopping", reason=self.stop_reason)
        threading.Thread(target=self._end_job, name="end-of-the-job", daemon=True).start()

    def _end_job(self) -> None:
        try:
            if self.is_over:
                job = self._coordinator.job
                self.executor.wait_until(lambda: not job.membership.current(), FAREWELL_SECONDS)
                self.executor.wait_until(
                    lambda: job.has_newest_weights or not job.membership.current(), UPLOAD_SECONDS
                )
            self.not_saved = save_final_state(
                self.job,
                self.config.save,
                self.engine,
                self.directory,
                self.snapshot_scheduler,
                self.snapshots,
                self._lost_data_dir,
            )
        finally:
            self.stopped.set()
            with self.executor.changed:
                self.executor.wake()

    def close(self) -> None:
        """Stop the clock. If the job is over, the other shards get END_SECONDS to learn it."""
        self.stopped.set()
        with self.executor.changed:
            self.executor.wake()
        self.executor.wait_until(
            lambda: not (self.is_over and any(s.connected for s in list(self.directory)[1:])),
            END_SECONDS,
        )
        if self._ticker.is_alive():
            self._ticker.join()
        if self._curves is not None:
            self._curves.close()
