"""Per-tensor scalars of an optimizer in reshards, restarts and standbys, against plain torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pscommon.core.errors import InvalidRequestError
from pscommon.optim import KINDS
from psserver.durability.state_records import checksum
from psworker import Client, OptimizerSpec
from psworker.client.arrays import spec_of
from tests.support.cluster import Cluster
from tests.support.optimizer_cases import WITH_SCALARS
from tests.support.reshards import reshard
from tests.support.standbys import RunningStandby
from tests.support.workers import connected, status, until

Make = Callable[..., Cluster]

SIZES = {"early": 900, "late": 700}
LATE = 4
"""Steps that "late" has no gradient for, so its scalars and step counts differ."""


def gradients(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {
        name: rng.normal(size=size)
        for name, size in SIZES.items()
        if name == "early" or step >= LATE
    }


def expected(name: str, hyper: dict[str, Any], steps: int) -> dict[str, torch.Tensor]:
    weights = {key: torch.zeros(size, dtype=torch.float64) for key, size in SIZES.items()}
    optimizer = KINDS[name].torch_class([*weights.values()], **hyper)
    for step in range(steps):
        pushed = gradients(step)
        for key, weight in weights.items():
            weight.grad = torch.from_numpy(pushed[key]) if key in pushed else None
        optimizer.step()
    return weights


def trainer(address: str, name: str, hyper: dict[str, Any]) -> Client:
    client = connected(address)
    client.register(
        {key: np.zeros(size) for key, size in SIZES.items()}, OptimizerSpec(name, **hyper)
    )
    return client


def train(client: Client, first: int, stop: int) -> None:
    for step in range(first, stop):
        assert client.push(gradients(step)).status == "applied"


def check(client: Client, name: str, hyper: dict[str, Any], steps: int) -> None:
    pulled = client.pull()
    for key, weight in expected(name, hyper, steps).items():
        np.testing.assert_allclose(pulled[key], weight.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "hyper"), WITH_SCALARS)
def test_a_reshard_transfers_the_state(cluster: Make, name: str, hyper: dict[str, Any]) -> None:
    servers = cluster(2, policy="async")
    with trainer(servers.address, name, hyper) as client:
        train(client, 0, 6)
        reshard(servers, 3, policy="async")
        train(client, 6, 9)
        reshard(servers, 1, policy="async")
        train(client, 9, 12)
        check(client, name, hyper, 12)


@pytest.mark.parametrize(("name", "hyper"), WITH_SCALARS)
def test_recovery_from_the_log_restores_the_state(
    cluster: Make, tmp_path: Path, name: str, hyper: dict[str, Any]
) -> None:
    """A snapshot in the middle, updates after it, then all servers die."""
    settings = {"data_dir": tmp_path, "durability": "log"}
    servers = cluster(2, **settings)
    with trainer(servers.address, name, hyper) as client:
        train(client, 0, 6)
        assert servers.servers[0].service is not None
        assert servers.servers[0].service.snapshot_scheduler.save(20.0) == 6
        train(client, 6, 9)
    servers.close()

    again = cluster(2, **settings)

    until(lambda: status(again.address)["state"] != "waiting for servers", "both servers")
    with trainer(again.address, name, hyper) as client:
        train(client, 9, 12)
        check(client, name, hyper, 12)


@pytest.mark.every(2)
@pytest.mark.parametrize(("name", "hyper"), WITH_SCALARS)
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2)])
def test_a_snapshot_restores_the_state_on_another_number_of_servers(
    cluster: Make, tmp_path: Path, name: str, hyper: dict[str, Any], before: int, after: int
) -> None:
    servers = cluster(before, data_dir=tmp_path)
    with trainer(servers.address, name, hyper) as client:
        train(client, 0, 6)
    servers.stop()

    again = cluster(after, data_dir=tmp_path)

    until(lambda: status(again.address)["state"] != "waiting for servers", "all servers")
    with trainer(again.address, name, hyper) as client:
        train(client, 6, 12)
        check(client, name, hyper, 12)


@pytest.mark.parametrize(("name", "hyper"), WITH_SCALARS)
def test_a_late_standby_receives_the_state(cluster: Make, name: str, hyper: dict[str, Any]) -> None:
    server = cluster().servers[0]
    with trainer(server.address, name, hyper) as client:
        train(client, 0, 6)
        with RunningStandby(server) as following:
            following.in_sync()
            train(client, 6, 9)
            standby_state = following.standby._standby_state
            assert standby_state is not None
            until(lambda: standby_state.version == 9, "all updates")
            store = standby_state.shard_state.store
            assert store is not None
            assert server.engine.live.store is not None
            assert checksum(store) == checksum(server.engine.live.store)
            assert store.scalars() == server.engine.live.store.scalars()
        check(client, name, hyper, 9)


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("rmsprop", '[{"lr": 1e39}]'),
        ("nadam", '[{"betas": [1.0, 0.9]}]'),
        ("asgd", '[{"lambd": -1e9}]'),
    ],
)
def test_a_push_with_unusable_numbers_changes_nothing(
    cluster: Make, name: str, groups: str
) -> None:
    """Otherwise every server would raise at an agreed update, and again after a restart."""
    servers = cluster(2)
    with connected(servers.address) as client:
        plan = client.model.agree(
            spec_of({"w": np.zeros(900, np.float32)}, {}, {}, OptimizerSpec(name))
        )
        weights, gradients = (np.zeros(plan.nbytes, np.uint8) for _ in range(2))
        client.model.start(weights.data)
        with pytest.raises(InvalidRequestError, match=f"{name}, group 0: "):
            client.model.exchange(gradients=gradients.data, weights=None, groups_json=groups)
        result = client.model.exchange(gradients=gradients.data, weights=weights.data)

        assert (result.status, result.version) == ("applied", 1)
