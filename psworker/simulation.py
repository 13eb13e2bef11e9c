"""A simulated job: servers and workers in one process, one step at a time in a fixed order.

The shards' engines, the coordinator and the client are those of real jobs. Only the network is
replaced: a DirectTransport calls the servers' methods. Each worker is a thread, and one thread runs
at a time: its turn ends when it has made a step or has to wait. So every run with the same
arguments has the same result, under every policy.

This is the only module of psworker that imports psserver.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry

from pscommon.core.errors import InvalidRequestError, PSError
from pscommon.core.limits import check_policy
from pscommon.system.thread_team import ALONE
from pscommon.wire.frames import Frame, chunks, decode_response, encode_header
from pscommon.wire.requests import (
    COLLECTIVE,
    EXCHANGE,
    NEXT_BATCH,
    REGISTER,
    A,
    AnyRequest,
    Q,
    Request,
)
from psproto.v1 import parameter_server_pb2 as ps
from psserver.coordinator.handlers import coordinator_handlers
from psserver.coordinator.service import CoordinatorService
from psserver.core.job.snapshot_schedule import PartReport
from psserver.core.servers.catch_up import CatchUp
from psserver.core.servers.server_entry import DeliveryCursor
from psserver.durability.shard_log import ShardLog
from psserver.durability.shard_recovery import ShardStateFactory
from psserver.durability.snapshots import SnapshotManager
from psserver.exchange.handlers import data_plane_handlers
from psserver.process.config import ServerConfig
from psserver.process.handlers import Handlers, answer
from psserver.process.identity import ServerIdentity
from psserver.process.job_files import ShardCountFile
from psserver.process.metrics import ServerMetrics
from psserver.shard.engine import Coordinator, ShardEngine
from psserver.shard.worker_traffic import WorkerTraffic
from psserver.waiting import ThreadWaiter, run
from psworker.core.clock import Clock
from psworker.transport.exchange_calls import (
    AnswerReceiver,
    Cancellation,
    ExchangeAnswer,
    receive_answer,
)

ENDLESS_LEASE_SECONDS = 1e6
UNLIMITED_BYTES = 1 << 62

TURN_SECONDS = 0.01
"""Simulated duration of one turn."""


IS_PENDING: Mapping[AnyRequest, Callable[[Any, Any], bool]] = {
    REGISTER: lambda request, response: response.state == response.STATE_PENDING,
    NEXT_BATCH: lambda request, response: (
        request.idle and not response.numbers and not response.end
    ),
    COLLECTIVE: lambda request, response: not response.done,
}
"""Whether a request has to wait, which ends the worker's turn, from its message and its answer."""


class Turns:
    """Lets one of `count` threads run at a time, in cyclic order.

    Attributes:
        turn_count: Number of turns that have ended.
    """

    def __init__(self, count: int) -> None:
        self.turn_count = 0
        self._changed = threading.Condition()
        self._active = list(range(count))
        self._turn = 0

    def enter(self, number: int) -> None:
        """Wait for the first turn of a thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn == number)

    def pass_on(self, number: int) -> None:
        """End the turn of a thread, and wait for its next one."""
        with self._changed:
            self._next(number)
            self._changed.wait_for(lambda: self._turn == number)

    def leave(self, number: int) -> None:
        """End the last turn of a thread."""
        with self._changed:
            if len(self._active) > 1:
                self._next(number)
            self._active.remove(number)

    def _next(self, number: int) -> None:
        self.turn_count += 1
        index = self._active.index(number)
        self._turn = self._active[(index + 1) % len(self._active)]
        self._changed.notify_all()


class SimulatedLink:
    """A shard's connection to the coordinator of the same process.

    Attributes:
        engine: The shard.
    """

    def __init__(
        self, service: CoordinatorService, make_engine: Callable[[Coordinator], ShardEngine]
    ) -> None:
        self._service, self.engine = service, make_engine(self)

    def request_report(self) -> None:
        self._service.shard_connections.report(self.engine.make_report())

    def record_part(self, part: PartReport) -> None:
        """Do nothing: there are no disks."""

    def describe_wait(self) -> str:
        return self._service.waiting_for


class SimulatedCluster:
    """The servers of a job, without network and disks.

    Args:
        config: Configuration of shard 0; its addresses and folders are not used.
        workers: Number of workers that take turns.

    Attributes:
        turns: The turns of the workers.
        service: The coordinator.
        handlers: They answer the workers' requests.
        servers: The data plane of each shard.
    """

    def __init__(self, config: ServerConfig, workers: int) -> None:
        self.turns = Turns(workers)
        shards = range(config.shards)
        metrics = [ServerMetrics(CollectorRegistry(), shard=shard) for shard in shards]
        snapshots = [SnapshotManager(None, shard, 1, metrics[shard]) for shard in shards]
        logs = [ShardLog(shard) for shard in shards]
        self._states = [
            ShardStateFactory(shard, ALONE, snapshots[shard], logs[shard]) for shard in shards
        ]
        make_engines = [
            partial(
                ShardEngine,
                self._states[shard].empty(config.shards),
                WorkerTraffic(metrics[shard], UNLIMITED_BYTES, "grpc"),
                lambda cut, store, record_part: None,
                log=logs[shard],
            )
            for shard in shards
        ]
        snapshots[0].generations.count()
        leader = ServerIdentity(0, config.shards, "simulated-0", job="simulated")
        self.service = CoordinatorService(
            config,
            ShardCountFile(config.shards, None),
            leader,
            make_engines[0],
            self._states[0],
            snapshots[0],
            metrics[0],
        )
        self.service.start(ticking=False)
        links = [SimulatedLink(self.service, make_engine) for make_engine in make_engines[1:]]
        self._engines = [self.service.engine, *(link.engine for link in links)]
        self._cursors = [DeliveryCursor() for _ in self._engines]
        self.handlers = coordinator_handlers(self.service)
        self.shards = [self._connect(engine) for engine in self._engines]
        self.deliver()

    def _connect(self, engine: ShardEngine) -> Handlers:
        """Connect a shard, and return its handlers."""
        shard = engine.live.shard
        if shard > 0:
            self.service.shard_connections.connect(
                shard, len(self._engines), f"simulated-{shard}", "simulated"
            )
            engine.coordinator.request_report()
        return data_plane_handlers(
            engine,
            ServerIdentity(shard, len(self._engines), f"simulated-{shard}", job=self.service.job),
        )

    def deliver(self) -> None:
        """Send updates to all shards until there are none, as LinkShard does between processes."""
        is_finished = False
        while not is_finished:
            is_finished = True
            for shard, engine in enumerate(self._engines[1:], start=1):
                update = self.service.shard_connections.next_update(
                    self.service.directory[shard], self._cursors[shard]
                )
                assert update is not None  # the number of shards does not change
                is_finished = (
                    is_finished
                    and update.cursor == self._cursors[shard]
                    and update.catch_up is CatchUp.FOLLOW
                )
                self._cursors[shard] = update.cursor
                if update.catch_up is CatchUp.BEGIN:
                    engine.install(
                        self._states[shard].fresh(
                            update.cursor.log_id, update.base, len(self._engines)
                        )
                    )
                    engine.coordinator.request_report()
                if update.model is not None:
                    engine.set_model(update.model)
                engine.deliver(update.cursor.log_id, update.entries)


class DirectTransport:
    """Calls the servers' methods for a worker. A request that has to wait ends the turn.

    Args:
        cluster: The servers.
        number: Number of the worker in the order of turns.
    """

    direct = True

    def __init__(self, cluster: SimulatedCluster, number: int) -> None:
        self.addresses: Sequence[str] = [
            f"simulated-{shard}" for shard in range(len(cluster.shards))
        ]
        self._cluster = cluster
        self._number = number
        self.clock = Clock(
            lambda: cluster.turns.turn_count * TURN_SECONDS, lambda _: self._pass_on()
        )

    def learn(
        self, job: str, addresses: Sequence[str], terms: Sequence[int], standbys: Sequence[str]
    ) -> None:
        """Do nothing: the servers stay in this process."""

    def find_primaries(self, job: str, timeout: float) -> bool:
        """Return False: there are no other servers."""
        return False

    def end_stalled(self) -> None:
        """Do nothing: no call stalls."""

    def answers(self, timeout: float) -> bool:
        """Return True: the servers are in this process."""
        return True

    def end_calls(self) -> None:
        """Do nothing: no call is in flight while another thread runs."""

    def request(self, row: Request[Q, A], message: Q, timeout: float, shard: int = 0) -> A:
        if row.may_wait:
            message.wait_ms = 0  # type: ignore[attr-defined]
        response: A = self._answer(row, message)
        self._cluster.deliver()
        if row in IS_PENDING and IS_PENDING[row](message, response):
            self._pass_on()
        return response

    def _answer(self, row: AnyRequest, message: Any) -> Any:
        return run(answer(self._cluster.handlers, row, message, ThreadWaiter()))

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
        may_wait, header.wait_ms = header.wait_ms > 0, 0
        sent = [encode_header(header), *(chunks(send) if header.has_data else ())]
        answer = map(decode_response, self._cluster.shards[shard][EXCHANGE](iter(sent), None))
        result = receive_answer(answer, receiver)
        self._cluster.deliver()
        pushed_last = header.seq > 0 and shard == len(self._cluster.shards) - 1
        if may_wait and (pushed_last or result.outcome == ps.OUTCOME_PENDING):
            self._pass_on()
        return ExchangeAnswer(result, 0.0, 0.0)

    def offer_memory(
        self, shard: int, header: ps.PushPullHeader, share: Callable[[], int], timeout: float
    ) -> None:
        raise InvalidRequestError("the servers are in this process")

    def relocate(self, addresses: Sequence[str]) -> bool:
        raise PSError("cannot reshard: a simulated job keeps its number of servers")

    def worker_key(self, worker: int) -> bytes:
        return b""

    def close(self) -> None:
        """Do nothing: no connection is open."""

    def _pass_on(self) -> None:
        self._cluster.turns.pass_on(self._number)


def simulated(shards: int, workers: int, policy: str, staleness: int | None) -> SimulatedCluster:
    """Return a cluster with settings of ps-server, in which leases never end.

    Args:
        shards: Number of shards.
        workers: Number of workers.
        policy: sync, async or ssp.
        staleness: Bound of ssp, in steps; None for the other policies.
    """
    check_policy(policy, staleness)  # workers that take turns cannot reduce
    config = ServerConfig(
        shards=shards,
        policy=policy,
        staleness=staleness,
        min_workers=workers,
        lease=ENDLESS_LEASE_SECONDS,
    )
    return SimulatedCluster(config, workers)
