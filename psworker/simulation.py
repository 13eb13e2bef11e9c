"""The real servers and workers in this one process, one step at a time in a fixed order
(simulate=True).

Everything that decides is the product's own code: the shards' engines, the coordinator, the
client. Only the network is missing: a DirectTransport calls the servers' methods. Workers are
threads of which one runs at a time, and each hands the turn to the next when it has made a step
or has to wait. So a run is the same every time, in every policy.

This is the one module of psworker that knows psserver.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry

from pscommon.core.errors import PSError
from pscommon.system.thread_team import ALONE
from pscommon.wire.frames import chunks, decode_response, encode_header
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import parameter_server_pb2 as ps
from psserver.coordinator.server_registry import DeliveryCursor
from psserver.coordinator.service import CoordinatorService
from psserver.coordinator.servicer import ControlPlaneServicer
from psserver.core.job.catch_up import CatchUp
from psserver.durability.record_sink import RecordSink, RecordSource
from psserver.durability.shard_log import ShardLog
from psserver.durability.shard_recovery import ShardStateFactory
from psserver.durability.snapshots import SnapshotManager
from psserver.process.config import ServerConfig
from psserver.process.identity import ServerIdentity
from psserver.process.metrics import ServerMetrics
from psserver.process.shard_count_file import ShardCountFile
from psserver.shard.engine import ShardEngine
from psserver.transfer.servicer import DataPlaneServicer
from psworker.core.clock import Clock
from psworker.transport.streams import AnswerReceiver, Cancellation, ExchangeAnswer, take

Request = TypeVar("Request")
Response = TypeVar("Response")

FOREVER = 1e6
UNBOUNDED = 1 << 62

TICK = 0.01
"""Simulated seconds that one turn takes."""


class Turns:
    """Lets one of `count` threads run at a time, in a circle."""

    def __init__(self, count: int) -> None:
        self.made = 0
        self._changed = threading.Condition()
        self._left = list(range(count))
        self._turn = 0

    def enter(self, number: int) -> None:
        """Wait for the turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn == number)

    def hand_on(self, number: int) -> None:
        """Let the others go first."""
        with self._changed:
            self._next(number)
            self._changed.wait_for(lambda: self._turn == number)

    def leave(self, number: int) -> None:
        """This thread is done."""
        with self._changed:
            if len(self._left) > 1:
                self._next(number)
            self._left.remove(number)

    def _next(self, number: int) -> None:
        self.made += 1
        self._turn = self._left[(self._left.index(number) + 1) % len(self._left)]
        self._changed.notify_all()


class SimulatedCluster:
    """The servers of a job. config: of shard 0; its addresses and folders are not used."""

    def __init__(self, config: ServerConfig, workers: int) -> None:
        self.turns = Turns(workers)
        shards = range(config.shards)
        metrics = [ServerMetrics(CollectorRegistry(), shard=shard) for shard in shards]
        snapshots = [SnapshotManager(None, shard, 1, metrics[shard]) for shard in shards]
        logs = [ShardLog(RecordSink(RecordSource.SHARD), shard) for shard in shards]
        self._states = [
            ShardStateFactory(shard, ALONE, snapshots[shard], logs[shard]) for shard in shards
        ]
        self._engines = [
            ShardEngine(
                self._states[shard].empty(config.shards),
                metrics[shard],
                lambda version, store: None,
                UNBOUNDED,
                "grpc",
                logs[shard],
            )
            for shard in shards
        ]
        snapshots[0].generations.count()
        leader = ServerIdentity(0, config.shards, "simulated-0", job="simulated")
        self.service = CoordinatorService(
            config,
            ShardCountFile(config.shards, None),
            leader,
            self._engines[0],
            self._states[0],
            snapshots[0],
            metrics[0],
        )
        self.service.start(ticking=False)
        self._cursors = [DeliveryCursor() for _ in self._engines]
        self.coordinator = ControlPlaneServicer(self.service)
        self.servers = [self._server(engine) for engine in self._engines]
        self.deliver()

    def _server(self, engine: ShardEngine) -> DataPlaneServicer:
        shard = engine.live.shard
        if shard > 0:
            self.service.connect_shard(shard, len(self._engines), f"simulated-{shard}", "simulated")
            engine.request_report = lambda: self.service.report(engine.make_report())
            engine.request_report()
            engine.describe_wait = lambda: self.service.waiting_for
        return DataPlaneServicer(
            engine,
            ServerIdentity(shard, len(self._engines), f"simulated-{shard}", job=self.service.job),
        )

    def deliver(self) -> None:
        """Send every shard all updates until there are none: what the links do between
        processes.
        """
        quiet = False
        while not quiet:
            quiet = True
            for shard, engine in enumerate(self._engines[1:], start=1):
                update = self.service.next_update(
                    self.service.registry[shard], self._cursors[shard]
                )
                assert update is not None  # their number does not change
                quiet = (
                    quiet
                    and update.cursor == self._cursors[shard]
                    and update.catch_up is CatchUp.FOLLOW
                )
                self._cursors[shard] = update.cursor
                if update.catch_up is CatchUp.BEGIN:
                    engine.install(
                        self._states[shard].fresh(
                            update.cursor.epoch, update.base, len(self._engines)
                        )
                    )
                    engine.request_report()
                if update.model is not None:
                    engine.set_model(update.model)
                engine.deliver(update.cursor.epoch, update.entries)


class DirectTransport:
    """A worker's requests as plain calls. A request that has to wait passes the turn on.

    number: The worker's place in the order of turns.
    """

    direct = True

    def __init__(self, cluster: SimulatedCluster, number: int) -> None:
        self.addresses: Sequence[str] = [
            f"simulated-{shard}" for shard in range(len(cluster.servers))
        ]
        self._cluster = cluster
        self._number = number
        self.clock = Clock(lambda: cluster.turns.made * TICK, lambda seconds: self._hand_on())

    def learn(
        self, job: str, addresses: Sequence[str], terms: Sequence[int], standbys: Sequence[str]
    ) -> None:
        """They are in this process, and stay."""

    def find_primaries(self, job: str, timeout: float) -> bool:
        """There is nobody else."""
        return False

    def end_stalled(self) -> None:
        """Nothing does."""

    def answers(self, timeout: float) -> bool:
        """They are in this process."""
        return True

    def end_calls(self) -> None:
        """None is in flight while another thread runs."""

    def join(self, request: co.JoinRequest, timeout: float) -> co.JoinResponse:
        return self._ask(self._cluster.coordinator.Join, request)

    def register(self, request: co.RegisterRequest, timeout: float) -> co.RegisterResponse:
        request.wait_ms = 0
        answer = self._ask(self._cluster.coordinator.Register, request)
        if answer.state == co.RegisterResponse.STATE_PENDING:
            self._hand_on()
        return answer

    def heartbeat(self, request: co.HeartbeatRequest, timeout: float) -> co.HeartbeatResponse:
        return self._ask(self._cluster.coordinator.Heartbeat, request)

    def leave(self, request: co.LeaveRequest, timeout: float) -> co.LeaveResponse:
        return self._ask(self._cluster.coordinator.Leave, request)

    def next_batch(self, request: co.NextBatchRequest, timeout: float) -> co.NextBatchResponse:
        request.wait_ms = 0
        answer = self._ask(self._cluster.coordinator.NextBatch, request)
        if not answer.numbers and not answer.end and request.idle:
            self._hand_on()
        return answer

    def return_batches(
        self, request: co.ReturnBatchesRequest, timeout: float
    ) -> co.ReturnBatchesResponse:
        return self._ask(self._cluster.coordinator.ReturnBatches, request)

    def report(self, request: co.ReportMetricsRequest, timeout: float) -> co.ReportMetricsResponse:
        return self._ask(self._cluster.coordinator.ReportMetrics, request)

    def status(self, request: co.GetStatusRequest, timeout: float) -> co.GetStatusResponse:
        return self._ask(self._cluster.coordinator.GetStatus, request)

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
        may_wait, header.wait_ms = header.wait_ms > 0, 0
        sent = [encode_header(header), *(chunks(send) if header.has_data else ())]
        answer = map(
            decode_response, self._cluster.servers[shard].exchange(iter(sent), lambda: True)
        )
        result = take(answer, receiver)
        self._cluster.deliver()
        pushed_last = header.seq > 0 and shard == len(self._cluster.servers) - 1
        if may_wait and (pushed_last or result.outcome == ps.OUTCOME_PENDING):
            self._hand_on()
        return ExchangeAnswer(result, 0.0, 0.0)

    def find_addresses(self, timeout: float) -> Sequence[str]:
        return self.addresses

    def relocate(self, addresses: Sequence[str]) -> None:
        raise PSError("simulated servers stay as many as they are")

    def attach(
        self, shard: int, request: ps.AttachMemoryRequest, timeout: float
    ) -> ps.AttachMemoryResponse:
        return ps.AttachMemoryResponse(reason="the servers are in this process")

    def close(self) -> None:
        """Nothing is open."""

    def _ask(self, method: Callable[[Request, None], Response], request: Request) -> Response:
        answer = method(request, None)
        self._cluster.deliver()
        return answer

    def _hand_on(self) -> None:
        self._cluster.turns.hand_on(self._number)


def simulated(shards: int, workers: int, policy: str, staleness: int | None) -> SimulatedCluster:
    """A cluster with settings as of ps-server, for that many workers. Leases never end: no time
    passes.
    """
    config = ServerConfig(
        shards=shards, policy=policy, staleness=staleness, min_workers=workers, lease=FOREVER
    )
    return SimulatedCluster(config, workers)
