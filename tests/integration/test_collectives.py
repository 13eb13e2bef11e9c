"""Barriers, means and broadcasts of scripts over real servers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import psworker
from pscommon.core.errors import InvalidRequestError, MismatchError, WaitTimeoutError
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.workers.collectives import CallKey
from psworker import Job
from psworker.client.local_client import LocalClient
from tests.support.cluster import Cluster
from tests.support.policies import POLICIES
from tests.support.training_threads import simulated
from tests.support.workers import (
    connected,
    data,
    joined,
    network,
    status,
    together,
    until,
)

Make = Callable[..., Cluster]


def coordinator_of(servers: Cluster) -> CoordinatorMachine:
    service = servers.servers[0].service
    assert service is not None
    return service.snapshot_scheduler.coordinator


def evaluating(address: str, rank: int, passes: int = 3) -> list[Any]:
    """Train; after each pass combine the loss of both workers and broadcast a decision."""
    results: list[Any] = []
    with joined(address, rank) as job:
        model = network()
        optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.05), model)
        batches = job.batches(data(), batch_size=8, seed=3, reseed=False)
        for _ in range(passes):
            total, samples = 0.0, 0
            for x, y in batches:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                total, samples = total + loss.item() * len(x), samples + len(x)
            mean = job.all_reduce({"loss": total / max(1, samples)}, samples=samples)
            best = job.broadcast({"loss": mean["loss"], "by": rank} if job.is_first else None)
            job.barrier()
            results.append((mean, best, job.version))
    return results


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_all_workers_get_the_same_results(cluster: Make, policy: dict[str, Any]) -> None:
    address = cluster(2, min_workers=2, **policy).address

    first, second = together(lambda: evaluating(address, 0), lambda: evaluating(address, 1))

    assert first == second
    assert all(best == {"loss": mean["loss"], "by": 0} for mean, best, _ in first)


def test_a_resumed_job_returns_the_results_of_finished_calls(cluster: Make, tmp_path: Path) -> None:
    """Its passes are done, so its scripts have other values now."""
    servers = cluster(1, min_workers=2, data_dir=tmp_path)
    address = servers.address
    first, _ = together(lambda: evaluating(address, 0), lambda: evaluating(address, 1))
    servers.stop()

    address = cluster(1, min_workers=2, data_dir=tmp_path).address
    again, _ = together(lambda: evaluating(address, 0, 4), lambda: evaluating(address, 1, 4))

    assert [result[:2] for result in again[:3]] == [result[:2] for result in first]


def test_a_call_that_one_worker_never_makes_ends_with_its_name(cluster: Make) -> None:
    address = cluster().address
    with (
        Job(connected(address, rank=0, wait_timeout=1.0)) as job,
        connected(address, rank=7),
        pytest.raises(WaitTimeoutError) as caught,
    ):
        job.barrier()

    assert caught.value.reason == "WAIT_TIMEOUT"
    assert "barrier (collective call 1)" in str(caught.value)
    assert "worker 2 (rank 7" in str(caught.value)
    assert str(caught.value).endswith(
        ". Try: the same calls on all workers, or a larger wait_timeout"
    )


def test_other_names_are_refused_and_the_first_worker_continues(cluster: Make) -> None:
    servers = cluster(min_workers=2)
    address = servers.address

    def first() -> dict[str, float]:
        with Job(connected(address, rank=0)) as job:
            return job.all_reduce({"loss": 1.0, "accuracy": 0.5})

    def second() -> str:
        with Job(connected(address, rank=1)) as job:
            until(lambda: coordinator_of(servers).job.collectives.open, "the first call")
            with pytest.raises(MismatchError) as caught:
                job.all_reduce({"loss": 1.0})
            assert caught.value.reason == "COLLECTIVE_MISMATCH"
            return str(caught.value)

    results = together(first, second)
    assert "Try: the same calls in the same order on all workers" in results[1]
    assert results[0] == {"accuracy": 0.5, "loss": 1.0}


def test_simulated_workers_wait_for_each_other() -> None:
    results = simulated(3, lambda job: job.all_reduce({"rank": job.rank}, samples=job.rank))

    assert results == [{"rank": pytest.approx(5 / 3)}] * 3


def test_without_servers_a_worker_gets_its_own_values() -> None:
    job = Job(LocalClient())

    job.barrier()
    assert job.all_reduce({"loss": torch.tensor([2.0])}, samples=5) == {"loss": 2.0}
    assert job.broadcast({"epochs": (1, 2)}) == {"epochs": [1, 2]}
    assert job.broadcast() is None


@pytest.mark.parametrize(
    "invalid",
    [
        lambda job: job.all_reduce({"loss": torch.ones(2)}),
        lambda job: job.all_reduce({"loss": "high"}),
        lambda job: job.all_reduce({}),
        lambda job: job.all_reduce({f"x{index}": 0.0 for index in range(257)}),
        lambda job: job.all_reduce({"loss": 1.0}, samples=-1),
        lambda job: job.all_reduce([1.0]),
        lambda job: job.broadcast(torch.ones(2)),
        lambda job: job.broadcast("x" * 65536),
    ],
)
def test_values_that_are_no_small_values_are_refused(invalid: Callable[[Job], object]) -> None:
    with pytest.raises(InvalidRequestError, match="Try: "):
        invalid(Job(LocalClient()))


def test_a_text_of_64_kib_is_broadcast(cluster: Make) -> None:
    text = "x" * (65536 - len('""'))
    with Job(connected(cluster().address, rank=0)) as job:
        assert job.broadcast(text) == text
        with pytest.raises(InvalidRequestError):
            job.broadcast(text + "x")


@pytest.mark.full
def test_a_drained_worker_leaves_a_barrier_and_releases_the_others(cluster: Make) -> None:
    servers = cluster(min_workers=3)
    address = servers.address

    def waits(rank: int) -> str:
        try:
            with Job(connected(address, rank=rank)) as job:
                job.barrier()
                return "passed"
        except psworker.Stopping:
            return "stopped"

    def drains() -> str:
        with connected(address, rank=2):
            until(lambda: len(status(address)["workers"]) == 3, "three workers")
            coordinator = coordinator_of(servers)
            until(
                lambda: [m.rank for m in coordinator.collectives.missing(CallKey(0, 1))] == [2],
                "two workers at the barrier",
            )
            drained = coordinator.membership.current()[1]
            coordinator.registration.drain(drained.worker)
            until(lambda: not drained.is_current, "the drained worker has left")
        return "left"

    assert together(lambda: waits(0), lambda: waits(1), drains) == ["passed", "stopped", "left"]


def test_results_are_json_of_all_kinds(cluster: Make) -> None:
    value = {"list": [1, 2.5, None, True], "text": "ä", "nested": {"a": []}}
    with Job(connected(cluster().address, rank=0)) as job:
        assert job.broadcast(value) == json.loads(json.dumps(value))
        assert job.all_reduce({"nan": float("nan"), "inf": float("inf")})["inf"] == float("inf")
