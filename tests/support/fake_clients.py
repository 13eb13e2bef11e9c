"""A small model and clients of servers in memory."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pscommon.core.model_spec import OptimizerSettings
from psworker.client.client import Client
from tests.support.fake_server import FakeCluster

SGD = OptimizerSettings("sgd", ({"lr": 0.5},))


def params(fill: float = 1.0) -> dict[str, Any]:
    """Large enough for every shard to hold a slice of w."""
    return {"w": np.full((100, 30), fill, np.float32), "b": np.full(7, fill, np.float32)}


def gradient(fill: float = 2.0) -> dict[str, Any]:
    return {name: np.full_like(array, fill) for name, array in params().items()}


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f"{n}-shards")
def cluster(request: pytest.FixtureRequest) -> Iterator[FakeCluster]:
    with FakeCluster(shards=request.param) as cluster:
        yield cluster


@pytest.fixture
def pair() -> Iterator[FakeCluster]:
    with FakeCluster(shards=2) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: FakeCluster) -> Iterator[Client]:
    with Client(cluster.addresses[0]) as client:
        client.register(params(), SGD)
        yield client
