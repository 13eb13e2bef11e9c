"""Clipped updates during reshards and with standbys."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

import psworker
from psserver.coordinator.status import describe
from psworker import Client
from tests.support.cluster import Cluster
from tests.support.reshards import reshard, weights
from tests.support.standbys import RunningStandby, has_same_state, standby_state
from tests.support.workers import connected, together, until

Make = Callable[..., Cluster]

CLIP = 0.5
ONES = {"w": np.ones(1000, np.float32), "b": np.ones(3, np.float32)}
CLIPPED = psworker.OptimizerSpec("sgd", lr=1.0, clip_norm=CLIP)
"""Every update moves the weights by CLIP, always in the same direction."""


def joined(address: str, rank: int) -> Client:
    client = connected(address, rank)
    client.register({name: np.zeros_like(one) for name, one in ONES.items()}, CLIPPED)
    return client


def distance(address: str) -> float:
    return float(
        np.sqrt(sum((array.astype(np.float64) ** 2).sum() for array in weights(address).values()))
    )


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_each_update_is_clipped_during_reshards(cluster: Make, policy: str) -> None:
    servers = cluster(2, policy=policy, min_workers=2)
    enough, pushed = threading.Event(), [0, 0]

    def push(rank: int) -> None:
        with joined(servers.address, rank) as client:
            while not enough.is_set():
                assert client.push_pull(ONES).status == "applied"
                pushed[rank] += 1

    def go_on() -> None:
        wanted = sum(pushed) + 4
        until(lambda: sum(pushed) >= wanted, "four more pushes")

    def move() -> None:
        try:
            go_on()
            for shards in (3, 1):
                assert reshard(servers, shards, policy=policy, min_workers=2).seconds > 0
                go_on()
        finally:
            enough.set()

    together(lambda: push(0), lambda: push(1), move)

    assert servers.servers[0].service is not None
    version = describe(servers.servers[0].service)["version"]
    assert version >= 6
    assert distance(servers.address) == pytest.approx(CLIP * version, rel=1e-4)


@pytest.mark.parametrize("shard", [0, 1])
def test_a_standby_follows_measurements_and_clipped_updates(cluster: Make, shard: int) -> None:
    """The shard's answers, and at shard 0 what the coordinator waits for."""
    servers = cluster(2, policy="sync", min_workers=2)
    primary = servers.servers[shard]
    with RunningStandby(primary) as following:
        following.in_sync()

        def push(rank: int) -> None:
            with joined(servers.address, rank) as client:
                for _ in range(5):
                    client.push_pull(ONES)

        together(lambda: push(0), lambda: push(1))

        until(
            lambda: has_same_state(following) and standby_state(following).version == 5, "the same"
        )
        coordinator = standby_state(following).coordinator
        if coordinator is not None and primary.service is not None:
            assert coordinator.job.as_json() == primary.service._coordinator.job.as_json()
    assert distance(servers.address) == pytest.approx(CLIP * 5, rel=1e-4)
