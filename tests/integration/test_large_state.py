"""A state above the 4 MiB that gRPC allows a message by default: a model of very many tensors."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from psserver.server import Server
from psworker import Client, OptimizerSpec
from tests.support.cluster import Cluster
from tests.support.standbys import RunningStandby
from tests.support.workers import DEADLINE, connected, status, until

Make = Callable[..., Cluster]

LARGE = 5 << 20

# long names replace a larger number of tensors; this is faster
NAMES = [f"{tensor:04}.{'experts.' * 128}weight" for tensor in range(LARGE >> 10)]
ZEROS = {name: np.zeros(1, np.float32) for name in NAMES}


def register(client: Client) -> None:
    client.register(ZEROS, OptimizerSpec("sgd", lr=1.0))


def push(client: Client) -> None:
    assert client.push({name: np.ones(1, np.float32) for name in NAMES}).status == "applied"


def save(servers: Cluster) -> None:
    service = servers.servers[0].service
    assert service is not None
    service.snapshot_scheduler.save(DEADLINE)


def all_counted(client: Client) -> float:
    """Return how many pushes are in every tensor."""
    (found,) = {float(-value[0]) for value in client.pull().values()}
    return found


@pytest.mark.full
@pytest.mark.parametrize("durability", ["snapshot", "log"])
def test_a_restarted_server_receives_the_large_state(
    cluster: Make, tmp_path: Path, durability: str
) -> None:
    servers = cluster(2, data_dir=tmp_path, durability=durability)
    with connected(servers.address) as client:
        register(client)
        push(client)
        save(servers)
        push(client)

    lost = servers.servers.pop()
    lost.close()
    servers.add(1, 2, data_dir=tmp_path, durability=durability, bind=lost.address)

    with connected(servers.address) as client:
        until(
            lambda: (
                status(servers.address)["state"] == "waiting for workers" or durability == "log"
            ),
            "it is back",
        )
        register(client)
        push(client)
        assert all_counted(client) == (3 if durability == "log" else 2)
    (manifest,) = [
        path for path in tmp_path.rglob("MANIFEST.json") if path.parent.name.endswith("1")
    ]
    assert manifest.stat().st_size > LARGE


@pytest.mark.full
@pytest.mark.parametrize("shard", [0, 1])
def test_a_standby_receives_the_large_state(cluster: Make, tmp_path: Path, shard: int) -> None:
    """With a snapshot and without."""

    def follow(server: Server) -> None:
        with RunningStandby(server) as following:
            following.in_sync()

    servers = cluster(2, data_dir=tmp_path)
    with connected(servers.address) as client:
        register(client)
        push(client)
        follow(servers.servers[shard])
        save(servers)
        follow(servers.servers[shard])
