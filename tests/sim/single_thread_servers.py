"""Servers as plain objects in one thread, so that disk operations have the same order in each run.

The coordinator, engines, snapshots, logs and the client are the shipped ones. They run without
processes, network and waiting, so a job with restarts takes a few hundredths of a second and a test
can repeat it for every disk operation. DirectServers.deliver replaces the connections between
servers.

To kill a server, a disk operation raises ServerKilled. The server's later operations raise it, too,
and do not reach the disk.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from pscommon.core.errors import SnapshotError, UnreachableError
from pscommon.core.log_entries import Cut, ShardReport
from pscommon.snapshot import Manifest
from pscommon.system.thread_team import ALONE
from pscommon.wire.frames import Frame, chunks, decode_response, encode_header
from pscommon.wire.requests import EXCHANGE, AnyRequest
from psproto.v1 import parameter_server_pb2 as ps
from psserver.coordinator.handlers import coordinator_handlers
from psserver.coordinator.service import CoordinatorService
from psserver.coordinator.shard_connections import ShardUpdate
from psserver.core.job.snapshot_schedule import PartReport
from psserver.core.servers.catch_up import CatchUp
from psserver.core.servers.server_entry import DeliveryCursor
from psserver.durability.record_sink import disk_log
from psserver.durability.shard_log import ShardLog
from psserver.durability.shard_recovery import ShardStateFactory
from psserver.durability.shard_state import LogUnfitError, ShardState
from psserver.durability.snapshots import SnapshotManager
from psserver.exchange.handlers import data_plane_handlers
from psserver.parameters.store import ParameterStore
from psserver.process.config import ServerConfig
from psserver.process.handlers import Handlers
from psserver.process.identity import ServerIdentity
from psserver.process.job_files import ShardCountFile
from psserver.process.metrics import ServerMetrics
from psserver.shard.engine import ShardEngine
from psserver.shard.worker_traffic import WorkerTraffic
from psworker.core.clock import Clock
from psworker.simulation import ENDLESS_LEASE_SECONDS, UNLIMITED_BYTES, DirectTransport
from psworker.transport.exchange_calls import (
    AnswerReceiver,
    Cancellation,
    ExchangeAnswer,
    receive_answer,
)
from tests.support.coordinators import SilentCoordinator

JOB = "direct"
MAX_DELIVERY_ROUNDS = 100
"""Rounds of deliveries after which updates must have ended."""
PAUSE_SECONDS = 0.01
"""Duration of each pause on the client's clock."""


class ServerKilled(BaseException):
    """The active server is killed at this operation."""


class DirectServer(SilentCoordinator):
    """One process of one server. DirectServers asks for its reports.

    is_killed: the process has been killed.
    outbox: messages to the coordinator that are not sent yet.
    cursor: the delivered part of the log; None without a connection.
    connection: number of the connection to the coordinator.
    last_report: the newest report on this connection.
    service: the coordinator, on shard 0.
    """

    def __init__(self, shard: int) -> None:
        self.shard, self.is_killed = shard, False
        self.outbox: deque[Callable[[CoordinatorService], None]] = deque()
        self.cursor: DeliveryCursor | None = None
        self.connection = 0
        self.last_report: ShardReport | None = None
        self.service: CoordinatorService | None = None
        self._log: ShardLog | None = None
        self._registry = CollectorRegistry()

    def start(self, config: ServerConfig) -> None:
        """Start as Server does. Raises SnapshotError if the disk refuses the start."""
        shard, metrics = self.shard, ServerMetrics(self._registry, shard=self.shard)
        self.snapshots = SnapshotManager(config.data_dir, shard, config.snapshot_keep, metrics)
        disk = disk_log(config, f"log-shard-{shard}", metrics.count_log_failure)
        self._log = ShardLog(0, disk)
        self.states = ShardStateFactory(shard, ALONE, self.snapshots, self._log)
        traffic = WorkerTraffic(metrics, UNLIMITED_BYTES, "grpc")
        state = self.states.empty(config.shards)
        make_engine = partial(ShardEngine, state, traffic, self._cut, log=self._log)
        self.identity = ServerIdentity(shard, config.shards, f"direct-{shard}", job=JOB)
        if shard == 0:
            self.snapshots.generations.count()
            self.service = CoordinatorService(
                config,
                ShardCountFile(config.shards, config.data_dir),
                self.identity,
                make_engine,
                self.states,
                self.snapshots,
                metrics,
            )
            self.engine = self.service.engine
            self.service.start(ticking=False)
        else:
            self.engine = make_engine(self)
        self.handlers = data_plane_handlers(self.engine, self.identity)

    def record_part(self, part: PartReport) -> None:
        self.outbox.append(lambda service: service.shard_connections.record_part(self.shard, part))

    def _cut(self, cut: Cut, store: ParameterStore, report: Callable[[PartReport], None]) -> None:
        """Write a snapshot part, and wait for the thread that writes it."""
        self.snapshots.write_part(cut, store, self.record_part)
        self.snapshots.close()
        if self.is_killed:
            raise ServerKilled

    def failures(self, name: str) -> float:
        """Return the metric ps_<name>_failures_total."""
        samples = [sample for family in self._registry.collect() for sample in family.samples]
        return sum(sample.value for sample in samples if sample.name == f"ps_{name}_failures_total")

    def handle_update(self, update: ShardUpdate) -> None:
        """Handle an update as CoordinatorLink does."""
        log_id, manifest = update.cursor.log_id, update.snapshot
        shards = self.identity.shards
        if update.catch_up is CatchUp.RECOVER:
            self._install(manifest, lambda: self.states.from_log(log_id, manifest, {shards}), True)
        elif update.catch_up is CatchUp.RESTORE and manifest is not None:
            self._install(manifest, lambda: self.states.from_snapshot(log_id, manifest, shards))
        elif update.catch_up is CatchUp.BEGIN:
            self.engine.install(self.states.fresh(log_id, update.base, shards))
        if update.model is not None:
            self.engine.set_model(update.model)
        self.engine.deliver(log_id, update.entries)
        if update.snapshots:
            self.snapshots.retain(update.snapshots, JOB)
            self.engine.log.remove_before(max(update.snapshots))

    def _install(
        self, manifest: Manifest | None, load: Callable[[], ShardState], continues: bool = False
    ) -> None:
        problem = ""
        try:
            self.engine.install(load(), continues)
        except (LogUnfitError, SnapshotError) as error:
            problem = str(error)
        version = manifest.version if manifest else 0
        self.outbox.append(
            lambda service: service.shard_connections.finish_catch_up(
                service.directory[self.shard], self.connection, version, problem
            )
        )

    def close(self) -> None:
        """Close the files. A killed server writes nothing more."""
        for owner in (
            self.service.history.journal.close if self.service else None,
            self._log.close if self._log else None,
        ):
            if owner is not None:
                with suppress(ServerKilled):
                    owner()


class DirectServers:
    """All servers of a job, for one worker.

    processes: current process of each shard; None if the server was killed.
    all_processes: all processes so far.
    refused_starts: number of starts that a disk refused.
    restarts_killed: restart killed servers while the client waits; otherwise raise ServerKilled.
    """

    def __init__(
        self, folder: Path, shards: int = 2, restarts_killed: bool = True, **settings: Any
    ) -> None:
        folder.mkdir(exist_ok=True)
        self._restarts_killed = restarts_killed
        self.config = ServerConfig(
            **{
                "shards": shards,
                "data_dir": folder,
                "lease": ENDLESS_LEASE_SECONDS,
                "log_fsync": "always",
                **settings,
            }
        )
        self.processes: list[DirectServer | None] = [None] * shards
        self.all_processes: list[DirectServer] = []
        self.refused_starts = 0
        self._active: list[DirectServer] = []

    @property
    def active(self) -> DirectServer:
        """The process whose code runs now."""
        return self._active[-1]

    @property
    def service(self) -> CoordinatorService:
        """The coordinator. Raises UnreachableError while shard 0 is down."""
        if (process := self.processes[0]) is None or process.service is None:
            raise UnreachableError("shard 0 is down")
        return process.service

    @property
    def is_log_broken(self) -> bool:
        """Whether a log lacks records that could not be written."""
        is_shard_log_broken = any(
            process.engine.make_report().log_broken
            for process in self.processes
            if process is not None
        )
        return is_shard_log_broken or self.service.history.journal.is_broken

    @property
    def handlers(self) -> Handlers:
        """They answer the worker's requests."""
        return coordinator_handlers(self.service)

    # ---- processes -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the killed servers; a disk operation may kill some again.

        Raises SnapshotError if a disk refuses a start.
        """
        for shard, previous in enumerate(self.processes):
            if previous is None:
                self.all_processes.append(DirectServer(shard))
                self.processes[shard] = self.all_processes[-1]
                try:
                    with self.acting_as(shard) as process:
                        process.start(self.config)
                except SnapshotError:
                    self.refused_starts += 1
                    self.kill(shard)
                    raise
                except UnreachableError:
                    continue  # killed again
        self.deliver()

    def kill(self, *shards: int) -> None:
        """Kill servers as kill -9 does, without a restart."""
        for shard in shards:
            process, self.processes[shard] = self.processes[shard], None
            if process is not None:
                process.is_killed = True
                self._active.append(process)
                process.close()
                self._active.pop()
                self._disconnect(process)

    def _disconnect(self, killed: DirectServer) -> None:
        for process in self.processes:
            if process is not None and killed.shard == 0:
                process.cursor = None
        if killed.cursor is not None and self.processes[0] is not None:
            self.service.shard_connections.disconnect(
                self.service.directory[killed.shard], killed.connection
            )

    @contextmanager
    def acting_as(self, shard: int) -> Iterator[DirectServer]:
        """Run the code of this server.

        Raises UnreachableError if the server is down or is killed in this context.
        """
        if (process := self.processes[shard]) is None:
            raise UnreachableError(f"shard {shard} is down")
        self._active.append(process)
        try:
            yield process
        except ServerKilled:
            self.kill(shard)
            if not self._restarts_killed:
                raise
            raise UnreachableError(f"shard {shard} was killed") from None
        finally:
            self._active.pop()

    def close(self) -> None:
        self.kill(*reversed(range(len(self.processes))))

    # ---- time and updates ------------------------------------------------------------------------

    def tick(self) -> None:
        """Restart killed servers, complete snapshots, and deliver updates."""
        self.start()
        with suppress(UnreachableError), self.acting_as(0):
            self.service.tick()
        self.deliver()

    def deliver(self) -> None:
        """Send all updates to all servers until there are none."""
        for _ in range(MAX_DELIVERY_ROUNDS):
            exchanged = [self._exchange(shard) for shard in range(len(self.processes))]
            if not any(exchanged):
                return
        raise AssertionError("updates do not end")

    def _exchange(self, shard: int) -> bool:
        """Exchange messages between a server and the coordinator. Return whether there were any."""
        if (process := self.processes[shard]) is None or self.processes[0] is None:
            return False
        try:
            has_sent = self._send_messages(process)
            return self._receive_update(process) or has_sent if shard else has_sent
        except UnreachableError:
            return True

    def _send_messages(self, process: DirectServer) -> bool:
        with self.acting_as(0):
            if process.shard and process.cursor is None:
                self._connect(process)
            count = len(process.outbox)
            while process.outbox:
                process.outbox.popleft()(self.service)
            report = process.engine.make_report()
            is_new, process.last_report = report != process.last_report, report
            if is_new:
                self.service.shard_connections.report(report)
        return is_new or count > 0

    def _connect(self, process: DirectServer) -> None:
        identity, report = process.identity, process.engine.make_report()
        _, process.connection = self.service.shard_connections.connect(
            process.shard, len(self.processes), identity.address, identity.instance
        )
        process.cursor, process.last_report = DeliveryCursor(report.log_id, report.index), None

    def _receive_update(self, process: DirectServer) -> bool:
        assert process.cursor is not None
        with self.acting_as(0):
            update = self.service.shard_connections.next_update(
                self.service.directory[process.shard], process.cursor
            )
        is_unchanged = update.cursor == process.cursor and update.catch_up is CatchUp.FOLLOW
        process.cursor = update.cursor
        with self.acting_as(process.shard):
            process.handle_update(update)
        return not is_unchanged

    def transport(self) -> "SingleThreadTransport":
        """Return the transport of the worker."""
        return SingleThreadTransport(self)


class SingleThreadTransport(DirectTransport):
    """Calls the servers' methods for the worker.

    A call raises UnreachableError if the server is down or is killed during the call. The servers
    tick when the client pauses.
    """

    def __init__(self, servers: DirectServers) -> None:
        self.addresses = [f"direct-{shard}" for shard in range(len(servers.processes))]
        self.clock = Clock(lambda: self._now, lambda seconds: self._pass_on())
        self._cluster = servers
        self._now = 0.0

    def exchange(
        self,
        shard: int,
        header: ps.PushPullHeader,
        send: Sequence[memoryview],
        receiver: AnswerReceiver,
        timeout: float,
        cancellation: Cancellation,
        frames: Iterator[Frame[ps.PushPullHeader]] | None = None,
    ) -> ExchangeAnswer:
        header.wait_ms = 0
        sent = [encode_header(header), *(chunks(send) if header.has_data else ())]
        with self._cluster.acting_as(shard) as process:
            answer = map(decode_response, process.handlers[EXCHANGE](iter(sent), None))
            result = receive_answer(answer, receiver)
        self._cluster.deliver()
        return ExchangeAnswer(result, 0.0, 0.0)

    def _answer(self, row: AnyRequest, message: Any) -> Any:
        with self._cluster.acting_as(0):
            return super()._answer(row, message)

    def _pass_on(self) -> None:
        self._now += PAUSE_SECONDS
        self._cluster.tick()
