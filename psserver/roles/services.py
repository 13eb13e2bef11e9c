"""The gRPC services of a primary."""

from collections.abc import Set

from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from psserver.coordinator.handlers import coordinator_handlers
from psserver.exchange.servicer import DataPlaneServicer
from psserver.peers.peer_handlers import peer_handlers
from psserver.process.handlers import grpc_services
from psserver.replication.servicer import primary_handlers
from psserver.roles.primary import Role


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
