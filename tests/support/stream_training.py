"""One training step over streams."""

from typing import Any

import numpy as np

from psworker import Client, OptimizerSpec
from psworker.transport.grpc_transport import GrpcTransport
from psworker.transport.socket_connection import SocketConnection
from tests.support.workers import connected

START: dict[str, Any] = {"w": np.zeros(200_000, np.float32), "bias": np.zeros(3, np.float32)}
ONES: dict[str, Any] = {name: np.ones_like(array) for name, array in START.items()}


def train(address: str, lanes: Any, **options: Any) -> str:
    """Make one step; return how the shards were reached."""
    with connected(address, lanes=lanes, **options) as client:
        make_step(client)
        assert float(client.weights["w"][-1]) == -1.0
        return " ".join(
            "unix" if each.address.startswith("/") else "tcp" for each in streams_of(client)
        )


def make_step(client: Client) -> None:
    """Register a model and make one step."""
    client.register(START, OptimizerSpec("sgd", lr=1.0))
    assert client.push_pull(ONES).status == "applied"


def streams_of(client: Client) -> list[SocketConnection]:
    """Return the client's streams for exchanges."""
    transport = client._connection.transport
    assert isinstance(transport, GrpcTransport)
    return list(transport._sockets._connections.values())
