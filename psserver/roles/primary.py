"""What a primary has on every shard, and its gRPC services."""

from collections.abc import Callable, Set
from contextlib import ExitStack
from typing import NamedTuple, Never

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from pscommon.system.thread_team import ThreadTeam
from pscommon.telemetry.http import new_registry
from pscommon.wire.endpoint import Endpoint, listen_grpc
from psserver.coordinator.handlers import coordinator_handlers
from psserver.coordinator.service import CoordinatorService
from psserver.durability.record_sink import disk_log
from psserver.durability.shard_log import ShardLog
from psserver.durability.shard_recovery import ShardStateFactory
from psserver.durability.snapshots import SnapshotManager
from psserver.exchange.handlers import data_plane_handlers
from psserver.peers.coordinator_link import CoordinatorLink
from psserver.peers.peer_handlers import peer_handlers
from psserver.process.access import Health, Reflection
from psserver.process.config import MAX_CONCURRENT_CALLS, ServerConfig
from psserver.process.handlers import grpc_handler
from psserver.process.identity import ServerIdentity
from psserver.process.job_files import JobIdFile
from psserver.process.metrics import ServerMetrics
from psserver.replication.handlers import primary_handlers
from psserver.replication.primary import CopyState, PrimaryReplicator, open_replicator
from psserver.replication.standby_state import Promotion
from psserver.shard.engine import Coordinator, ShardEngine
from psserver.shard.worker_traffic import WorkerTraffic

PORT_RELEASE_SECONDS = 2.0
"""Time until a port is free after its server has ended."""

STATE_COPY_TIMEOUT_SECONDS = 5.0
"""Time within which a consistent copy for a standby must succeed."""


class Primary(NamedTuple):
    """What a primary has on every shard.

    promotion: the state of a standby that is primary now; None otherwise.
    grpc: its port is open; it is not started yet.
    address: HOST:PORT of that port.
    """

    config: ServerConfig
    promotion: Promotion | None
    metrics: ServerMetrics
    snapshots: SnapshotManager
    grpc: grpc.Server
    address: str
    replicator: PrimaryReplicator
    log: ShardLog
    states: ShardStateFactory

    def make_engine(self, shards: int, coordinator: Coordinator) -> ShardEngine:
        """Return the shard, which asks this coordinator."""
        config = self.config
        engine = ShardEngine(
            self.states.empty(shards),
            WorkerTraffic(self.metrics, config.in_flight, config.lanes),
            self.snapshots.write_part,
            coordinator,
            self.log,
            config.gradient_rules,
        )
        if self.promotion is not None:
            engine.install(self.promotion.standby_state.shard_state)
        return engine

    def make_identity(self, shards: int, job: str, bound: str, name: JobIdFile) -> ServerIdentity:
        """Return the server's identity, with the job as ServerIdentity has it."""
        config, promotion = self.config, self.promotion
        hello = promotion.standby_state.hello if promotion is not None else None
        address, known = config.advertise or self.address, hello.coordinator if hello else ""
        if job:
            # a generated name is stored at once: shard 0 may die before the first snapshot
            name.store(job)
        identity = ServerIdentity(
            config.shard, shards, address, config.join or known, job, bound, name
        )
        identity.standbys, identity.coordinator_hint = hello.standbys if hello else (), known
        identity.term = self.replicator.term
        if hello is not None and hello.job_key:
            identity.worker_keys.learn(bytes.fromhex(hello.job_key))
        return identity


def open_primary(
    config: ServerConfig,
    promotion: Promotion | None,
    deposed: Callable[[str], Never],
    resources: ExitStack,
) -> Primary:
    """Open the port, the failover lock and the shard's log; `resources` closes them.

    Args:
        deposed: As in PrimaryReplicator.

    Raises:
        TakenError, SnapshotError, PSError: The server cannot start.
    """
    metrics = ServerMetrics(new_registry(), shard=config.shard)
    snapshots = SnapshotManager(config.data_dir, config.shard, config.snapshot_keep, metrics)
    retry_seconds = PORT_RELEASE_SECONDS if promotion is not None else 0.0
    server, address = listen_grpc(
        Endpoint(config.bind), MAX_CONCURRENT_CALLS, retry_seconds=retry_seconds
    )
    resources.callback(lambda: server.stop(grace=None))
    record = promotion.primary_record if promotion is not None else None
    replicator = open_replicator(config, config.advertise or address, record, metrics, deposed)
    disk = disk_log(config, f"log-shard-{config.shard}", metrics.count_log_failure)
    log = ShardLog(config.shard, disk, replicator)
    resources.callback(log.close)
    team = ThreadTeam(config.threads or 1)
    states = ShardStateFactory(config.shard, team, snapshots, log)
    return Primary(config, promotion, metrics, snapshots, server, address, replicator, log, states)


class Role(NamedTuple):
    """A primary in its role.

    engine: the shard.
    copy_state: copies the state of the server for a new standby.
    service: the coordinator; None on other shards than 0.
    link: the connection to the coordinator; None on shard 0.
    """

    primary: Primary
    identity: ServerIdentity
    engine: ShardEngine
    copy_state: CopyState
    service: CoordinatorService | None = None
    link: CoordinatorLink | None = None


def add_services(role: Role) -> tuple[health.HealthServicer, Set[str]]:
    """Add all services to the server. Return that of its health, and the names of the others."""
    identity, engine, primary = role.identity, role.engine, role.primary
    handlers = {
        **data_plane_handlers(engine, identity),
        **peer_handlers(engine.live, identity),
        **primary_handlers(primary.replicator, identity, role.copy_state),
        **(coordinator_handlers(role.service) if role.service is not None else {}),
    }
    names = {row.service for row in handlers}
    handler = grpc_handler(handlers, identity, primary.metrics.record_call)
    health_servicer = health.HealthServicer()
    primary.grpc.add_generic_rpc_handlers((handler, Health(health_servicer)))
    shown = (*names, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(Reflection(shown), primary.grpc)
    return health_servicer, names
