"""Connections of the shards to shard 0: processes connect, report, and get updates."""

import threading
from typing import NamedTuple

from pscommon.core.log_entries import Entry, ShardReport
from pscommon.core.model_spec import ModelSpec
from pscommon.snapshot import Manifest
from pscommon.telemetry.logs import get_logger
from pscommon.tracing.recorder import server_spans
from psproto.v1 import coordinator_pb2 as pb
from psserver.coordinator.executor import CommandExecutor
from psserver.coordinator.job_start import JobStart
from psserver.coordinator.resharding import ReshardRequests
from psserver.coordinator.snapshot_jobs import SnapshotScheduler
from psserver.core.commands.job_commands import RecordPart
from psserver.core.job.snapshot_schedule import PartReport
from psserver.core.servers.catch_up import CatchUp
from psserver.core.servers.server_entry import DeliveryCursor, ServerEntry
from psserver.core.servers.shard_directory import ShardDirectory
from psserver.core.servers.shard_protocol import process_report, replace_process
from psserver.durability.snapshots import SnapshotManager
from psserver.monitoring.tracing import DecisionSpans

log = get_logger(__name__)


class ShardUpdate(NamedTuple):
    """What to send to a shard, and the cursor after it.

    All fields are of the same moment: an action combined with a later list of servers would be
    wrong.

    Attributes:
        base: Index of the log entry at which the log starts.
        catch_up: What the shard must do before it can follow the log.
        snapshots: Versions of the snapshots that are kept.
        shards: Number of shards.
        addresses: Primaries by shard; empty where none has connected.
        standbys: Standbys by shard; empty where there is none.
        reshard_count: How often the number of shards has changed.
        reshard: The reshard in progress; None without one.
    """

    cursor: DeliveryCursor
    base: int
    model: ModelSpec | None
    catch_up: CatchUp
    snapshot: Manifest | None
    entries: list[Entry]
    snapshots: list[int]
    shards: int
    addresses: list[str]
    standbys: list[str]
    reshard_count: int
    reshard: pb.Move | None


class ShardConnections:
    """Carries out what ShardDirectory decides. All methods may be called from any thread.

    Args:
        stopped: Set once the job or this server has ended.
    """

    def __init__(
        self,
        executor: CommandExecutor,
        directory: ShardDirectory[Manifest],
        history: JobStart,
        snapshots: SnapshotManager,
        snapshot_scheduler: SnapshotScheduler,
        reshard_requests: ReshardRequests,
        stopped: threading.Event,
    ) -> None:
        self._executor, self._directory, self._history = executor, directory, history
        self._snapshots, self._snapshot_scheduler = snapshots, snapshot_scheduler
        self._reshard_requests, self._stopped = reshard_requests, stopped
        self._decision_spans = DecisionSpans()

    def connect(
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
            server, replaces = self._directory.connect(
                shard, shards, address, instance, followed, term
            )
            connection = server.connection
            self._reshard_requests.learn()
            self._executor.wake()
        if replaces:
            with self._executor.step() as (recorder, now):
                is_failover = replace_process(recorder, self._directory, server, now)
            self._snapshot_scheduler.wanted |= is_failover
        log.info("shard_connected", peer_shard=shard, shards=shards, address=address, term=term)
        return server, connection

    def disconnect(self, server: ServerEntry, connection: int) -> None:
        """Record the end of a connection."""
        with self._executor.changed:
            lost = self._directory.disconnect(server, connection)
            self._executor.wake()
        if lost and not (server.is_leaving or self._stopped.is_set()):
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
        has_logs, arrived = self._history.durable, server_spans.now()
        # most reports bring no log entry, and concern no waiting request
        with self._executor.step(quiet=True) as (recorder, now):
            member = server or self._directory[report.shard]
            log_index = recorder.coordinator.log.index
            decision = process_report(
                recorder, self._directory, member, connection, report, now, has_logs
            )
            if server_spans.is_on:
                entries = recorder.coordinator.log.after(log_index)
                self._decision_spans.record(report, arrived, entries)
            if decision.is_change:
                self._executor.wake()
        if decision.catch_up is CatchUp.GO_BACK:
            job = recorder.coordinator.job
            self._history.go_back(f"shard {report.shard} was restarted", job.log_id, job.version)

    def next_update(self, server: ServerEntry, cursor: DeliveryCursor) -> ShardUpdate | None:
        """Return what a shard has not received yet; None if it does not follow the log."""
        with self._executor.changed:
            coordinator, directory = self._executor.coordinator, self._directory
            self._reshard_requests.dismiss()
            delivery = directory.next_delivery(server, cursor, coordinator)
            if delivery is None:
                return None
            adopts = None
            if delivery.catch_up is CatchUp.ADOPT:
                adopts = self._reshard_requests.state()
                if adopts is None:  # the next delivery repeats the action
                    cursor = delivery.cursor._replace(catch_up=None)
                    delivery = delivery._replace(cursor=cursor)
            recovers = delivery.catch_up is CatchUp.RECOVER
            return ShardUpdate(
                delivery.cursor,
                coordinator.log.base,
                coordinator.job.model,
                delivery.catch_up,
                self._history.newest if recovers else directory.snapshot,
                delivery.entries,
                self._snapshots.retained,
                directory.shards,
                directory.addresses,
                directory.standbys,
                directory.shard_count.changes,
                self._reshard_requests.describe(adopts),
            )

    def next_entries(
        self, server: ServerEntry, cursor: DeliveryCursor, model: ModelSpec | None
    ) -> tuple[DeliveryCursor, list[Entry]] | None:
        """Return the entries that a shard lacks, and the cursor after them; None if it needs a
        complete update instead.

        model: The model that the shard has.
        """
        with self._executor.changed:
            coordinator = self._executor.coordinator
            self._reshard_requests.dismiss()
            delivery = self._directory.next_delivery(server, cursor, coordinator)
            if (
                delivery is None
                or delivery.catch_up is not CatchUp.FOLLOW
                or coordinator.job.reshard is not None
                or coordinator.job.model is not model
            ):
                return None
            return delivery.cursor, delivery.entries

    def record_part(self, shard: int, part: PartReport) -> None:
        """Record that a shard has written its part of a snapshot, or why it could not."""
        self._executor.do(RecordPart(shard, part))

    def finish_catch_up(
        self, server: ServerEntry, connection: int, version: int, problem: str
    ) -> None:
        """Record that a shard has finished its catch-up action, or why it failed."""
        with self._executor.changed:
            if not self._directory.is_current(server, connection, self._executor.coordinator):
                return
            catch_up = self._directory.end_catch_up(server)
        if catch_up is CatchUp.RECOVER and problem:
            log.error("shard_log_unusable", peer_shard=server.shard, problem=problem)
        elif catch_up is CatchUp.RESTORE:
            self._history.loaded(server.shard, version, problem)
        elif problem:
            self._history.refused(problem)
