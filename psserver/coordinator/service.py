"""The job on shard 0: what workers, shards and commands ask of the coordinator, and its clock."""

import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from pscommon.core.errors import MismatchError, PSError, UnreachableError
from pscommon.core.limits import MAX_REASON_CHARACTERS
from pscommon.core.log_entries import BatchKey, ShardReport
from pscommon.core.model_spec import ModelSpec
from pscommon.core.partition import PartitionPlan
from pscommon.telemetry.logs import get_logger
from psserver.coordinator.executor import CommandExecutor
from psserver.coordinator.final_state import save_final_state
from psserver.coordinator.heartbeats import Heartbeats
from psserver.coordinator.job_history import JobHistory
from psserver.coordinator.resharding import ReshardRequests
from psserver.coordinator.server_registry import (
    DeliveryCursor,
    ServerEntry,
    ServerRegistry,
    ShardUpdate,
)
from psserver.coordinator.snapshot_jobs import SnapshotScheduler
from psserver.coordinator.status import JobView, describe, statistics
from psserver.coordinator.worker_requests import DataShares, register
from psserver.core.commands.waiting import waiting_for
from psserver.core.data.data_ledger import DataLedger
from psserver.core.job.admission import check_switch, is_full
from psserver.core.job.catch_up import CatchUp
from psserver.core.job.coordinator import BatchesReply, CoordinatorMachine
from psserver.core.job.snapshot_schedule import PartReport
from psserver.core.workers.members import Member
from psserver.core.workers.membership import GENERATION
from psserver.durability.record_sink import StandbyLink
from psserver.durability.shard_recovery import ShardStateFactory
from psserver.durability.snapshots import SnapshotManager
from psserver.monitoring.first_workers import FirstWorkers
from psserver.monitoring.pass_progress import PassProgress
from psserver.monitoring.worker_monitor import WorkerMonitor, health
from psserver.process.config import ServerConfig
from psserver.process.identity import ServerIdentity
from psserver.process.metrics import ServerMetrics
from psserver.process.shard_count_file import ShardCountFile
from psserver.process.worker_exits import WorkerExits
from psserver.replication.hello import CoordinatorFacts
from psserver.replication.standby_state import Promotion
from psserver.shard.engine import ShardEngine

log = get_logger(__name__)


class CoordinatorService:
    """The coordinator of a job. All methods may be called from any thread.

    Every change of the machine goes through the executor.
    """

    def __init__(
        self,
        config: ServerConfig,
        layout: ShardCountFile,
        identity: ServerIdentity,
        engine: ShardEngine,
        states: ShardStateFactory,
        snapshots: SnapshotManager,
        metrics: ServerMetrics,
        standby_link: StandbyLink | None = None,
    ) -> None:
        self.config, self.engine, self.snapshots, self.metrics = config, engine, snapshots, metrics
        self.registry = ServerRegistry(layout, identity.address, standby_link)
        self._identity, self._began_at, self._standby_link = (
            identity,
            time.monotonic(),
            standby_link,
        )
        self.stop_reason: str | None = None  # why this server stops
        self.is_over = False  # the job ends with this server
        self.failure: PSError | None = None  # the error that ended the job
        self.not_saved = ""  # what of the final state is not saved, and why
        self.lost_data_dir = ""  # why this server continues without its --data-dir
        self.stopped = threading.Event()  # the final state is saved, or cannot be saved
        self._history = JobHistory(
            config,
            identity,
            engine,
            states,
            snapshots,
            self.registry,
            metrics,
            self._fail,
            standby_link,
        )
        self._executor = CommandExecutor(
            self._history.new_recorder(),
            engine,
            lambda: self.registry.missing,
            lambda: self.stop_reason is not None,
            self._fail,
            self._broken,
        )
        self._history.replace_recorder = self._executor.replace_recorder
        self.heartbeats = Heartbeats(self._executor, self._check_is_over)
        self.progress = PassProgress()
        self.snapshot_scheduler = SnapshotScheduler(
            self._executor, self._history, snapshots, self.registry
        )
        self.reshard_requests = ReshardRequests(
            self._executor, self.registry, engine, snapshots, identity, config
        )
        self.data_shares = DataShares(self._executor)
        self._first_workers = FirstWorkers(config.join_timeout, lambda: self.waiting_for)
        self._worker_monitor, self.worker_exits = (
            WorkerMonitor(metrics, config.on_worker_loss.seconds),
            WorkerExits(),
        )
        self._ticker = threading.Thread(target=self._tick_forever, name="ticker", daemon=True)

    def start(self, ticking: bool = True, promotion: Promotion | None = None) -> None:
        """Continue the job or begin one, then start the clock.

        Args:
            ticking: Start the clock; a simulation calls `tick` itself.
            promotion: The state that this process replicated as a standby.
        """
        self.engine.request_report = lambda: self.report(self.engine.make_report())
        self.engine.describe_wait = lambda: self.waiting_for
        self.engine.check_first_workers = self._first_workers.check
        if promotion is not None:
            self._history.install_promotion(promotion)
            self.snapshot_scheduler.wanted = True
        else:
            self._history.start()
            if (job := self._coordinator).begun:
                self.snapshots.resumed = {
                    "version": job.version,
                    "steps": job.counts["applied"],
                    "samples": job.samples,
                }
        coordinator = self._coordinator
        self.engine.deliver(coordinator.epoch, coordinator.entries_after(0))
        self.report(self.engine.make_report())
        if ticking:
            self._ticker.start()

    @property
    def _coordinator(self) -> CoordinatorMachine:
        return self._executor.coordinator

    @property
    def job(self) -> str:
        return self._identity.job

    @property
    def waiting_for(self) -> str:
        """What the job waits for now, in words; empty if it waits for nothing."""
        with self._executor.changed:
            waiting = self.registry.missing or self.reshard_requests.waiting_for
            return waiting or waiting_for(self._coordinator, time.monotonic())

    # ---- workers ---------------------------------------------------------------------------------

    def join(
        self, job: str, rank: int | None, host: str, pid: int, device: str, attempt: int = 0
    ) -> Member:
        self.check_job(job)
        self._check_goes_on()
        member: Member = self._executor.do(
            "join", rank=rank, host=host, pid=pid, device=device, attempt=attempt
        )
        self.snapshots.generations.reserve((member.worker - 1) // GENERATION)
        log.info("worker_joined", worker=member.worker, rank=member.rank, host=host, pid=pid)
        return member

    @property
    def policy(self) -> str:
        return self._coordinator.policy.name

    @property
    def ledger(self) -> DataLedger:
        return self._coordinator.ledger

    def _check_goes_on(self) -> None:
        if self.stop_reason is not None:
            raise UnreachableError(f"shard 0 is stopping: {self.stop_reason}", "STOPPING")

    def check_job(self, job: str) -> None:
        if job and job != self.job:
            raise MismatchError(f"these servers run job {self.job}, not {job}", "JOB_MISMATCH")

    def register(self, worker: int, spec: ModelSpec, seconds: float) -> str:
        """Return ready, upload or pending; wait up to `seconds` while the answer is pending."""
        return register(
            self._executor,
            self.engine,
            self.registry.shards,
            self.config.in_flight,
            worker,
            spec,
            seconds,
        )

    def _check_is_over(self) -> bool:
        """Return whether the job is over. Raises why it has failed."""
        if self.failure is not None:
            raise self.failure
        return self.is_over

    def alive(self, ago: Mapping[int, float]) -> None:
        """Record when the bytes of these workers last moved through a shard, as ages in seconds."""
        self._executor.step(lambda recorder, now: recorder.coordinator.alive(ago, now), quiet=True)

    def leave(self, worker: int, reason: str, version: int) -> None:
        """Remove a worker that leaves.

        Args:
            version: The newest version that the worker knows.
        """
        self._executor.do("leave", worker=worker, reason=reason[:MAX_REASON_CHARACTERS])
        self._history.count_lost_updates(worker, version)
        self.metrics.gone(worker)
        log.info("worker_left", worker=worker, reason=reason or "done")

    def drain(self, worker: int) -> None:
        """Ask a worker to leave at its next step boundary."""
        self._executor.do("drain", worker=worker)
        log.info("worker_drain_requested", worker=worker)

    def set_policy(self, name: str, staleness: int | None, max_staleness: int | None) -> None:
        """Use another policy from the next update on."""
        row = self.config.row(name, staleness, max_staleness)
        self._executor.step(
            lambda recorder, now: check_switch(recorder.coordinator, row, self.config.in_flight)
        )
        self._executor.do("set_policy", row=(name, staleness, max_staleness, row.backup))
        log.info("policy_changed", policy=name, staleness=staleness, max_staleness=max_staleness)

    def next_batches(self, seconds: float, **asked: Any) -> BatchesReply | None:
        """Return batches, or the end of the data; None if there are none within `seconds`.

        A job that is over has no more batches. If only this server stops, batches follow after
        its restart.

        Args:
            asked: Arguments of the command: the worker, its loop, and what it needs.
        """
        answer: BatchesReply | None = self._executor.until(
            lambda r, now: r.do("next_batches", now, **asked), seconds
        )
        if answer is None and self.is_over:
            return BatchesReply(end=True)
        if answer is None:
            self._check_goes_on()
            self._first_workers.check()
        return answer

    def return_batches(self, worker: int, batches: Iterable[BatchKey], used: bool) -> None:
        self._executor.do(
            "return_batches",
            worker=worker,
            batches=list(batches),
            **({"used": True} if used else {}),
        )

    @property
    def begun(self) -> bool:
        """Whether every shard has weights."""
        return self._coordinator.begun and not self.registry.missing

    @property
    def version(self) -> int:
        return self._coordinator.version

    @property
    def plan(self) -> PartitionPlan:
        if self._coordinator.model is None:
            raise UnreachableError("no worker has registered a model yet", "NOT_READY")
        return PartitionPlan(self._coordinator.model, self._coordinator.shards)

    # ---- shards ----------------------------------------------------------------------------------

    def connect_shard(
        self,
        shard: int,
        shards: int,
        address: str,
        instance: str,
        followed: bool = False,
        term: int = 1,
    ) -> tuple[ServerEntry, int]:
        """Register the process of a shard's primary.

        Args:
            instance: Differs at every start of the process.
            followed: The process has followed a log since it started.

        Returns:
            Its entry, and the number of this connection.

        Raises:
            MismatchError: The shard is unknown, or another process serves it.
            TakenError: There is a primary of a higher term.
        """
        with self._executor.changed:
            server, replaces = self.registry.connect(
                shard, shards, address, instance, followed, term
            )
            connection = server.connection
            self.reshard_requests.learn()
            self._executor.wake()
        if replaces and self.registry.is_member(server):
            self._executor.do("reborn", shard=shard)
            if term > 1:  # its predecessor may have reported more than it has
                self._executor.do("shard_lost", shard=shard)
                self.snapshot_scheduler.wanted = True
        log.info("shard_connected", peer_shard=shard, shards=shards, address=address, term=term)
        return server, connection

    def paused(self) -> AbstractContextManager[tuple[CoordinatorFacts, dict[str, Any]]]:
        """Yield the state for a standby of shard 0; the coordinator does not change meanwhile."""
        return self._history.paused(self._executor)

    def disconnect_shard(self, server: ServerEntry, connection: int) -> None:
        with self._executor.changed:
            lost = self.registry.disconnect(server, connection)
            self._executor.wake()
        if lost and not (server.is_leaving or self.stopped.is_set()):
            log.warning("shard_connection_lost", peer_shard=server.shard, address=server.address)

    def report(
        self, report: ShardReport, server: ServerEntry | None = None, connection: int | None = None
    ) -> None:
        """Handle a shard report. If the shard does not follow the current log, choose its catch-
        up action.

        Args:
            server: The reporting server; None: this process.
            connection: The connection over which the report came.
        """
        with self._executor.changed:
            server, coordinator = server or self.registry[report.shard], self._coordinator
            if not self._is_current(server, connection):
                return
            catch_up = self.registry.choose_catch_up(report, coordinator, self._history.durable)
            changed = catch_up is not server.catch_up or server.ready is not (
                catch_up is CatchUp.FOLLOW
            )
            server.ready, server.catch_up = catch_up is CatchUp.FOLLOW, catch_up
            server.is_recovery_requested, server.log_broken = (
                server.is_recovery_requested or catch_up is CatchUp.RECOVER,
                report.log_broken,
            )
            server.logs = report.log_bytes > 0
            if changed:
                self._executor.wake()
        if catch_up is CatchUp.FOLLOW:
            # checked again under the lock: a new primary, which may be behind, may have connected
            self._executor.step(
                lambda r, now: (
                    r.report(report, now) if self._is_current(server, connection) else None
                )
            )
            if is_full(self._coordinator, report.log_bytes):
                self._executor.step(lambda recorder, now: recorder.cut(now))
        elif catch_up is CatchUp.BEGIN and changed:
            self._executor.do("shard_lost", shard=report.shard)
        elif catch_up is CatchUp.GO_BACK:
            self._history.go_back(
                f"shard {report.shard} was restarted", coordinator.epoch, coordinator.version
            )

    def _is_current(self, server: ServerEntry, connection: int | None) -> bool:
        """Return whether the server is a member and the connection is its current one.

        Candidates, leaving servers, replaced servers and old connections are excluded.
        """
        return (
            server.shard < self._coordinator.members
            and self.registry.is_member(server)
            and connection in (None, server.connection)
        )

    def next_update(self, server: ServerEntry, cursor: DeliveryCursor) -> ShardUpdate | None:
        """Return what the shard has not received; None if it does not follow the current log."""
        with self._executor.changed:
            coordinator = self._coordinator
            self.reshard_requests.dismiss()
            if not self.registry.is_member(server):
                return None
            index = cursor.reached if cursor.epoch == coordinator.epoch else coordinator.log.base
            entries = coordinator.entries_after(index) if server.ready else []
            reached = max(index, coordinator.log.index) if server.ready else index
            fresh = (cursor.epoch, cursor.catch_up) != (coordinator.epoch, server.catch_up)
            catch_up = (server.catch_up or CatchUp.FOLLOW) if fresh else CatchUp.FOLLOW
            snapshot = (
                self._history.newest if catch_up is CatchUp.RECOVER else self.registry.snapshot
            )
            adopts = self.reshard_requests.state() if catch_up is CatchUp.ADOPT else None
            known = server.catch_up if catch_up is not CatchUp.ADOPT or adopts is not None else None
            return ShardUpdate(
                DeliveryCursor(coordinator.epoch, reached, known),
                coordinator.log.base,
                coordinator.model,
                catch_up,
                snapshot,
                entries,
                self.snapshots.retained,
                self.registry.picture(),
                self.reshard_requests.move(adopts),
            )

    def wait_for_update(self, server: ServerEntry, cursor: DeliveryCursor, seconds: float) -> None:
        """Wait until there may be something new for the shard, at most `seconds`."""
        with self._executor.changed:
            coordinator = self._coordinator
            outside = not self.registry.is_member(server)
            idle = coordinator.epoch == cursor.epoch and (
                coordinator.log.index <= cursor.reached or not server.ready
            )
            if outside or idle:
                self._executor.changed.wait(seconds)

    def snapshot_part(self, shard: int, part: PartReport) -> None:
        self._executor.do("part", shard=shard, part=part)

    def restored(self, server: ServerEntry, connection: int, version: int, problem: str) -> None:
        """Record that a shard has finished the action that it was asked to take, or why it
        failed.
        """
        with self._executor.changed:
            if not self._is_current(server, connection):
                return
            catch_up, server.catch_up = server.catch_up, None
        if catch_up is CatchUp.RECOVER and problem:
            log.error("shard_log_unusable", peer_shard=server.shard, problem=problem)
        elif catch_up is CatchUp.RESTORE:
            self._history.loaded(server.shard, version, problem)

    def restore(self, version: int, seconds: float) -> None:
        """Roll all shards back to the snapshot of this version; workers rejoin by themselves."""
        self._check_goes_on()
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
            while not self.stopped.wait(self._executor.next_tick_seconds()):
                self.tick()
        except Exception as bug:
            self._broken(bug)

    def tick(self) -> None:
        self._first_workers.update(self._coordinator)
        if alive := self.engine.traffic.transfer.take_active_workers():
            self.alive(alive)
        self._worker_monitor.log_lost(
            self._executor.step(
                lambda r, now: r.tick(
                    now, self.worker_exits.among(r.coordinator.membership.current_workers())
                )
            )
        )
        with self._executor.changed:
            now, coordinator = time.monotonic(), self._coordinator
            found = health(coordinator, now)
            self.progress.update(coordinator, now)
            waits = self.registry.missing or (coordinator.membership.current() and self.waiting_for)
        self._worker_monitor.update(coordinator, found, waits or "", now)
        self.snapshot_scheduler.advance()
        self.reshard_requests.advance()
        self.registry[0].stats = statistics(self.engine, self._standby_link)
        if self.config.exit_when_done and self._coordinator.membership.is_run_done(
            self.config.min_workers
        ):
            self.stop("all workers are done")

    def stop(self, reason: str, over: bool = True) -> None:
        """Begin to stop this server, with a last snapshot if one is possible. Returns at once.

        Args:
            over: The job ends as well: first its workers leave, then all servers stop. Otherwise
                the job waits for this server to return.
        """
        with self._executor.changed:
            self.is_over = self.is_over or over
            if self.stop_reason is not None:
                return
            self.stop_reason = reason or "asked to"
            self._executor.wake()
        log.info("server_stopping", reason=self.stop_reason)
        threading.Thread(target=self._end_job, name="end-of-the-job", daemon=True).start()

    def _end_job(self) -> None:
        try:
            if self.is_over:
                self._executor.wait_for_workers_to_leave()
            self.not_saved = save_final_state(
                self.job,
                self.config.save,
                self.engine,
                self.registry,
                self.snapshot_scheduler,
                self.snapshots,
                self.lost_data_dir,
            )
        finally:
            self.stopped.set()
            with self._executor.changed:
                self._executor.wake()

    def close(self) -> None:
        """Stop the clock. If the job is over, the other shards get up to 2 s to learn it."""
        self.stopped.set()
        with self._executor.changed:
            self._executor.wake()
            self._executor.changed.wait_for(
                lambda: not (self.is_over and any(s.connected for s in list(self.registry)[1:])),
                2.0,
            )
        if self._ticker.is_alive():
            self._ticker.join()

    def end(self) -> None:
        """Close the log. No call is in progress any more."""
        self._history.close()

    def status(self) -> dict[str, Any]:
        """Return the answer to GetStatus (see psserver/coordinator/status.py)."""
        listing = list(self.snapshots.listing())
        with self._executor.changed:
            view = JobView(
                self.job,
                self.config,
                self.registry,
                self.snapshots,
                self.progress,
                self.waiting_for,
                self.stop_reason,
            )
            return describe(view, self._coordinator, listing, time.monotonic(), self._began_at)
