"""Servers as plain objects in one thread: their disk's operations come in the same order every
time.

All that writes, reads and decides is the product's: service, engines, snapshots, logs, and the
client. What is missing are processes, the network and time. So a whole job with its restarts
takes some hundredths of a second, and a test can walk through all operations of it. What the
links do between processes, `deliver` does.

A server dies of Killed, which passes through it like any exception; what it tries on the way
does not reach the disk.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from pscommon.core.errors import SnapshotError, UnreachableError
from pscommon.core.log_entries import Cut, ShardReport
from pscommon.snapshot import Manifest
from pscommon.system.thread_team import ALONE
from pscommon.wire.frames import chunks, decode_response, encode_header
from psproto.v1 import parameter_server_pb2 as ps
from psserver.coordinator.service import CoordinatorService
from psserver.coordinator.servicer import ControlPlaneServicer
from psserver.coordinator.shard_connections import ShardUpdate
from psserver.core.servers.catch_up import CatchUp
from psserver.core.servers.server_entry import DeliveryCursor
from psserver.durability.record_sink import RecordSink, RecordSource, disk_log
from psserver.durability.shard_log import ShardLog
from psserver.durability.shard_recovery import ShardStateFactory
from psserver.durability.shard_state import LogUnfitError, ShardState
from psserver.durability.snapshots import SnapshotManager
from psserver.parameters.store import ParameterStore
from psserver.process.config import ServerConfig
from psserver.process.identity import ServerIdentity
from psserver.process.metrics import ServerMetrics
from psserver.process.shard_count_file import ShardCountFile
from psserver.shard.engine import ShardEngine
from psserver.shard.worker_traffic import WorkerTraffic
from psserver.transfer.servicer import DataPlaneServicer
from psworker.core.clock import Clock
from psworker.simulation import ENDLESS_LEASE_SECONDS, UNLIMITED_BYTES, DirectTransport
from psworker.transport.streams import AnswerReceiver, Cancellation, ExchangeAnswer, receive_answer

JOB = "direct"
ROUNDS = 100
"""Deliveries after which news that never end are a bug."""
PAUSE = 0.01
"""Seconds that the client's clock takes for a pause."""


class Killed(BaseException):
    """The server that is at work ends here and now."""


class DirectServer:
    """One process of one server.

    outbox: what it will send to the coordinator.
    cursor: what it has received of the log; None without a connection.
    """

    def __init__(self, shard: int) -> None:
        self.shard, self.dead = shard, False
        self.outbox: deque[Callable[[CoordinatorService], None]] = deque()
        self.cursor: DeliveryCursor | None = None
        self.line = 0
        self.reported: ShardReport | None = None
        self.service: CoordinatorService | None = None
        self._log: ShardLog | None = None
        self._registry = CollectorRegistry()

    def start(self, config: ServerConfig) -> None:
        """As Server does. SnapshotError where its disk does not let it."""
        shard, metrics = self.shard, ServerMetrics(self._registry, shard=self.shard)
        self.snapshots = SnapshotManager(config.data_dir, shard, config.snapshot_keep, metrics)
        self.snapshots.on_part = lambda part: self.outbox.append(
            lambda service: service.shard_connections.record_part(shard, part)
        )
        disk = disk_log(config, f"log-shard-{shard}", metrics.count_log_failure)
        self._log = ShardLog(RecordSink(RecordSource.SHARD, disk))
        self.states = ShardStateFactory(shard, ALONE, self.snapshots, self._log)
        self.engine = ShardEngine(
            self.states.empty(config.shards),
            WorkerTraffic(metrics, UNLIMITED_BYTES, "grpc"),
            self._cut,
            self._log,
        )
        self.identity = ServerIdentity(shard, config.shards, f"direct-{shard}", job=JOB)
        self.server = DataPlaneServicer(self.engine, self.identity)
        if shard == 0:
            self.snapshots.generations.count()
            self.service = CoordinatorService(
                config,
                ShardCountFile(config.shards, config.data_dir),
                self.identity,
                self.engine,
                self.states,
                self.snapshots,
                metrics,
            )
            self.service.start(ticking=False)

    def _cut(self, cut: Cut, store: ParameterStore) -> None:
        """Nothing else goes on while the part is written."""
        self.snapshots.write_part(cut, store)
        self.snapshots.close()
        if self.dead:
            raise Killed

    def failures(self, name: str) -> float:
        """ps_<name>_failures_total, as dashboards see it."""
        samples = [sample for family in self._registry.collect() for sample in family.samples]
        return sum(sample.value for sample in samples if sample.name == f"ps_{name}_failures_total")

    def hear(self, update: ShardUpdate) -> None:
        """As Link does."""
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
            self.engine.retire_log(max(update.snapshots))

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
                service.registry[self.shard], self.line, version, problem
            )
        )

    def close(self) -> None:
        """Frees its files. What a dead one still has to write stays unwritten."""
        for owner in (
            self.service.end if self.service else None,
            self._log.close if self._log else None,
        ):
            if owner is not None:
                with suppress(Killed):
                    owner()


class DirectServers:
    """All servers of a job, for one worker.

    lives: current processes by shard; None where the server is dead.
    all: all processes so far.
    refused: number of starts that a disk refused.
    revive: restart dead servers during a wait; otherwise the caller gets the Killed.
    """

    def __init__(self, folder: Path, shards: int = 2, revive: bool = True, **settings: Any) -> None:
        folder.mkdir(exist_ok=True)
        self._revive = revive
        self.config = ServerConfig(
            **{
                "shards": shards,
                "data_dir": folder,
                "lease": ENDLESS_LEASE_SECONDS,
                "log_fsync": "always",
                **settings,
            }
        )
        self.lives: list[DirectServer | None] = [None] * shards
        self.all: list[DirectServer] = []
        self.refused = 0
        self._at_work: list[DirectServer] = []

    @property
    def at_work(self) -> DirectServer:
        """Whose operations these are."""
        return self._at_work[-1]

    @property
    def service(self) -> CoordinatorService:
        """The coordinator. Raises UnreachableError while shard 0 is dead."""
        if (life := self.lives[0]) is None or life.service is None:
            raise UnreachableError("shard 0 is dead")
        return life.service

    @property
    def log_broken(self) -> bool:
        """Does some log lack what could not be written?"""
        shards = any(
            life.engine.make_report().log_broken for life in self.lives if life is not None
        )
        return shards or self.service._history.journal.is_broken

    @property
    def coordinator(self) -> ControlPlaneServicer:
        return ControlPlaneServicer(self.service)

    # ---- lives -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the dead servers; some may die again. Raises SnapshotError if a disk refuses."""
        for shard, before in enumerate(self.lives):
            if before is None:
                self.all.append(DirectServer(shard))
                self.lives[shard] = self.all[-1]
                try:
                    with self.inside(shard) as life:
                        life.start(self.config)
                except SnapshotError:
                    self.refused += 1
                    self.kill(shard)
                    raise
                except UnreachableError:
                    continue  # dead again
        self.deliver()

    def kill(self, *shards: int) -> None:
        """kill -9, from outside; the dead stay dead."""
        for shard in shards:
            life, self.lives[shard] = self.lives[shard], None
            if life is not None:
                life.dead = True
                self._at_work.append(life)
                life.close()
                self._at_work.pop()
                self._disconnect(life)

    def _disconnect(self, dead: DirectServer) -> None:
        for life in self.lives:
            if life is not None and dead.shard == 0:
                life.cursor = None
        if dead.cursor is not None and self.lives[0] is not None:
            self.service.shard_connections.disconnect(self.service.registry[dead.shard], dead.line)

    @contextmanager
    def inside(self, shard: int) -> Iterator[DirectServer]:
        """What this server does. UnreachableError if it is dead, or dies of it."""
        if (life := self.lives[shard]) is None:
            raise UnreachableError(f"shard {shard} is dead")
        self._at_work.append(life)
        try:
            yield life
        except Killed:
            self.kill(shard)
            if not self._revive:
                raise
            raise UnreachableError(f"shard {shard} was killed") from None
        finally:
            self._at_work.pop()

    def close(self) -> None:
        self.kill(*reversed(range(len(self.lives))))

    # ---- time and updates ------------------------------------------------------------------------

    def tick(self) -> None:
        """Time passes: the dead are started again, snapshots are filed, and all hear of it."""
        self.start()
        with suppress(UnreachableError), self.inside(0):
            self.service.tick()
        self.deliver()

    def deliver(self) -> None:
        """Send all updates to all servers until there are none."""
        for _ in range(ROUNDS):
            exchanged = [self._exchange(shard) for shard in range(len(self.lives))]
            if not any(exchanged):
                return
        raise AssertionError("updates do not end")

    def _exchange(self, shard: int) -> bool:
        """One server and the coordinator tell each other what is new. Was there anything?"""
        if (life := self.lives[shard]) is None or self.lives[0] is None:
            return False
        try:
            has_sent = self._tell(life)
            return self._hear(life) or has_sent if shard else has_sent
        except UnreachableError:
            return True

    def _tell(self, life: DirectServer) -> bool:
        with self.inside(0):
            if life.shard and life.cursor is None:
                self._connect(life)
            count = len(life.outbox)
            while life.outbox:
                life.outbox.popleft()(self.service)
            report = life.engine.make_report()
            new, life.reported = report != life.reported, report
            if new:
                self.service.shard_connections.report(report)
        return new or count > 0

    def _connect(self, life: DirectServer) -> None:
        identity, report = life.identity, life.engine.make_report()
        _, life.line = self.service.shard_connections.connect(
            life.shard, len(self.lives), identity.address, identity.instance
        )
        life.cursor, life.reported = DeliveryCursor(report.log_id, report.index), None

    def _hear(self, life: DirectServer) -> bool:
        assert life.cursor is not None
        with self.inside(0):
            update = self.service.shard_connections.next_update(
                self.service.registry[life.shard], life.cursor
            )
        quiet = update.cursor == life.cursor and update.catch_up is CatchUp.FOLLOW
        life.cursor = update.cursor
        with self.inside(life.shard):
            life.hear(update)
        return not quiet

    def lane(self) -> "Lane":
        """For the worker."""
        return Lane(self)


class Lane(DirectTransport):
    """The worker's calls. Where a server is dead, or dies of one, there is no answer; while the
    client pauses, time passes."""

    def __init__(self, servers: DirectServers) -> None:
        self.addresses = [f"direct-{shard}" for shard in range(len(servers.lives))]
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
        frames: Iterator[bytes] | None = None,
    ) -> ExchangeAnswer:
        header.wait_ms = 0
        sent = [encode_header(header), *(chunks(send) if header.has_data else ())]
        with self._cluster.inside(shard) as life:
            answer = map(decode_response, life.server.exchange(iter(sent), lambda: True))
            result = receive_answer(answer, receiver)
        self._cluster.deliver()
        return ExchangeAnswer(result, 0.0, 0.0)

    def _call(self, method: Callable[[Any, None], Any], request: Any) -> Any:
        with self._cluster.inside(0):
            answer = method(request, None)
        self._cluster.deliver()
        return answer

    def _pass_on(self) -> None:
        self._now += PAUSE
        self._cluster.tick()
