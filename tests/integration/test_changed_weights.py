"""A push returns only changed weights, and a worker's weights still equal the job's."""

import random
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest

from pscommon.core.errors import WaitTimeoutError
from psworker import Client, OptimizerSpec
from tests.support.cluster import Cluster
from tests.support.lanes import each_lane
from tests.support.workers import connected, together, weights_of

Make = Callable[..., Cluster]

SIZES = {"a": 256, "b": 64, "c": 4096, "d": 16}
"""float32 numbers, whole blocks of 64 bytes."""
BUFFER, FROZEN = 32, 512
ALL = 4 * sum(SIZES.values())


def joined(address: str, **options: Any) -> Client:
    """Return a worker of a model that starts at zero and loses what is pushed."""
    client = connected(address, **options)
    values = {name: np.zeros(size, np.float32) for name, size in SIZES.items()}
    client.register(values, OptimizerSpec("sgd", lr=1.0), frozen={"f": np.ones(FROZEN, np.float32)})
    return client


def ones(names: Collection[str]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.ones(SIZES[name], np.float32) for name in names}


class SentBytes:
    """Bytes of weights that a cluster has sent since the last call."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._before = cluster, 0
        self()

    def __call__(self) -> int:
        total = sum(server.engine.traffic.statistics.sent_bytes for server in self._cluster.servers)
        since, self._before = total - self._before, total
        return since


def same(client: Client, address: str) -> bool:
    """Return whether the worker's weights equal those of a new observer."""
    job = weights_of(address)
    assert client.weights.keys() == job.keys()
    return all(np.array_equal(client.weights[name], job[name]) for name in job)


# ---- bytes ---------------------------------------------------------------------------------------


@pytest.mark.every(4)
@each_lane
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_push_returns_only_what_it_has_changed(cluster: Make, lanes: Any, shards: int) -> None:
    servers = cluster(shards)
    with joined(servers.address, lanes=lanes) as client:
        sent = SentBytes(servers)
        for names in ("a", "b", "abcd", "cd", "", "d"):
            assert client.push_pull(ones(names)).status == "applied"
            assert sent() == 4 * sum(SIZES[name] for name in names)

        assert same(client, servers.address)


@each_lane
def test_changes_of_other_workers_are_returned_too(cluster: Make, lanes: Any) -> None:
    servers = cluster(2, policy="async")
    with joined(servers.address, lanes=lanes) as one, joined(servers.address, lanes=lanes) as other:
        sent = SentBytes(servers)
        for names in ("b", "ad", "b"):
            other.push(ones(names))
        assert sent() == 0
        one.push_pull(ones("d"))

        assert sent() == 4 * (SIZES["a"] + SIZES["b"] + SIZES["d"])
        assert same(one, servers.address)


@each_lane
def test_a_version_that_the_worker_has_is_not_sent_again(cluster: Make, lanes: Any) -> None:
    servers = cluster(2, bad_gradients="skip")
    with joined(servers.address, lanes=lanes) as client:
        client.push_pull(ones("abcd"))
        sent = SentBytes(servers)
        bad = ones("abcd") | {"c": np.full(SIZES["c"], np.nan, np.float32)}

        assert client.push_pull(bad).status == "rejected"
        assert sent() == 0
        assert same(client, servers.address)


@each_lane
def test_a_stale_push_returns_the_missed_changes(cluster: Make, lanes: Any) -> None:
    servers = cluster(2, policy="async", max_staleness=0)
    with joined(servers.address, lanes=lanes) as one, joined(servers.address, lanes=lanes) as other:
        other.push(ones("ab"))
        sent = SentBytes(servers)

        assert one.push_pull(ones("d")).status == "stale"
        assert sent() == 4 * (SIZES["a"] + SIZES["b"])
        assert one.push_pull(ones("d")).status == "applied"
        assert same(one, servers.address)


def test_a_pull_returns_all_trained_tensors(cluster: Make) -> None:
    servers = cluster(2)
    with joined(servers.address, lanes="grpc") as client:
        client.push_pull(ones("a"))
        sent = SentBytes(servers)
        client.pull()
        assert sent() == ALL


def test_frozen_tensors_are_sent_once_and_buffers_with_each_version(cluster: Make) -> None:
    servers = cluster(1, bad_gradients="skip")
    buffer = np.zeros(BUFFER, np.float32)
    with connected(servers.address, lanes="grpc") as client:
        params = {"a": np.zeros(256, np.float32)}
        client.register(
            params,
            OptimizerSpec("sgd", lr=1.0),
            buffers={"m": buffer},
            frozen={"f": np.ones(FROZEN, np.float32)},
        )
        sent = SentBytes(servers)
        for names, nbytes in (("a", 1024 + 128), ("", 128)):
            client.push_pull(ones(names) | {"m": buffer + 3})
            assert sent() == nbytes
        assert (
            client.push_pull({"a": np.full(256, np.nan, np.float32), "m": buffer}).status
            == "rejected"
        )
        assert sent() == 0
        client.pull()
        assert sent() == 1024 + 128

        assert same(client, servers.address)


# ---- values --------------------------------------------------------------------------------------


@each_lane
def test_local_changes_of_weights_are_replaced_where_the_job_changes(
    cluster: Make, lanes: Any
) -> None:
    servers = cluster(2)
    with joined(servers.address, lanes=lanes) as client:
        client.push_pull(ones("abcd"))
        for array in client.weights.values():
            array.fill(100)
        client.push_pull(ones("ac"))
        assert {name: float(client.weights[name][0]) for name in "ac"} == {"a": -2.0, "c": -2.0}

        assert {name: float(client.weights[name][0]) for name in "bd"} == {"b": 100.0, "d": 100.0}

        client.pull()
        job = weights_of(servers.address)
        assert all(np.array_equal(client.weights[name], job[name]) for name in SIZES)


@each_lane
def test_after_an_error_all_weights_are_sent(cluster: Make, lanes: Any) -> None:
    """It is unknown then what the worker has."""
    servers = cluster(2, min_workers=2)
    with (
        joined(servers.address, lanes=lanes) as other,
        joined(servers.address, lanes=lanes, wait_timeout=0.3) as one,
    ):
        with pytest.raises(WaitTimeoutError):
            one.push_pull(ones("a"))
        for array in one.weights.values():
            array.fill(7)
        other.push(ones("b"))

        assert one.push_pull(ones("a")).status in ("applied", "duplicate")
        job = weights_of(servers.address)
        assert all(np.array_equal(one.weights[name], job[name]) for name in SIZES)


@pytest.mark.every(4)
@each_lane
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_after_every_push_the_workers_weights_equal_the_jobs(
    cluster: Make, lanes: Any, shards: int
) -> None:
    """Async workers in random turns, with random gradients, some of which are bad."""
    address = cluster(shards, policy="async", bad_gradients="skip").address
    chance = random.Random(shards)
    workers = [joined(address, lanes=lanes) for _ in range(3)]
    statuses = []
    for turn in range(25):
        worker = chance.choice(workers)
        push = ones(chance.sample("abcd", chance.randrange(5)))
        if turn % 5 == 4:
            push |= {"c": np.full(SIZES["c"], np.inf, np.float32)}
        if chance.random() < 0.2:
            worker.push(ones("b"))
        statuses.append(worker.push_pull(push).status)
        assert same(worker, address)

    assert (statuses.count("applied"), statuses.count("rejected")) == (20, 5)
    for worker in workers:
        worker.close()


@pytest.mark.every(2)
@each_lane
@pytest.mark.parametrize("shards", [1, 3])
def test_concurrent_pushes_end_with_the_same_weights(
    cluster: Make, lanes: Any, shards: int
) -> None:
    address = cluster(shards, policy="async").address
    workers = [joined(address, lanes=lanes) for _ in range(4)]

    def work(number: int) -> dict[str, int]:
        chance, made = random.Random(number), dict.fromkeys(SIZES, 0)
        for _ in range(30):
            names = chance.sample("abcd", chance.randrange(1, 4))
            assert workers[number].push_pull(ones(names)).status == "applied"
            for name in names:
                made[name] += 1
                assert -float(workers[number].weights[name].max()) >= made[name]
        return made

    made = together(*[lambda number=number: work(number) for number in range(4)])
    expected = {name: -float(sum(each[name] for each in made)) for name in SIZES}
    for worker in workers:
        worker.push_pull({})
        assert {name: float(worker.weights[name][0]) for name in SIZES} == expected
        assert same(worker, address)
        worker.close()
