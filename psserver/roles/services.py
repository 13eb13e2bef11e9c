"""A primary in its role, and its gRPC services."""

from collections.abc import Set
from typing import NamedTuple

from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from psserver.coordinator.handlers import coordinator_handlers
from psserver.coordinator.service import CoordinatorService
from psserver.exchange.servicer import DataPlaneServicer
from psserver.peers.coordinator_link import CoordinatorLink
from psserver.peers.peer_handlers import peer_handlers
from psserver.process.handlers import grpc_services
from psserver.process.identity import ServerIdentity
from psserver.replication.primary import CopyState
from psserver.replication.servicer import primary_handlers
from psserver.roles.primary import Primary
from psserver.shard.engine import ShardEngine


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
        **DataPlaneServicer(engine, identity).handlers,
        **peer_handlers(engine.live, identity),
        **primary_handlers(primary.replicator, identity, role.copy_state),
        **(coordinator_handlers(role.service) if role.service is not None else {}),
    }
    names = {row.service for row in handlers}
    primary.grpc.add_generic_rpc_handlers(grpc_services(handlers, primary.metrics.record_call))
    health_servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, primary.grpc)
    reflection.enable_server_reflection(
        (*names, health.SERVICE_NAME, reflection.SERVICE_NAME), primary.grpc
    )
    return health_servicer, names
