"""Each push counts with the hyper-parameters of its script; a round uses those of one member."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import psworker
from pscommon.telemetry.logs import Event
from psserver.durability.state_records import checksum
from psworker import Job
from psworker.optim.optimizer import ServerOptimizer
from tests.support.cluster import Cluster
from tests.support.events import records_of
from tests.support.lanes import each_lane
from tests.support.standbys import RunningStandby
from tests.support.workers import connected, digest, status, together, until, weights_of

Make = Callable[..., Cluster]

WIDTH = 5
FREE_RUNNING = {"ssp": {"policy": "ssp", "staleness": 50}, "async": {"policy": "async"}}


class Worker:
    """A worker that trains one vector, starting at zero, by SGD.

    Attributes:
        job: Its job.
        optimizer: Its optimizer.
    """

    def __init__(
        self, address: str, rank: int, lr: float, lanes: str = "grpc", **options: Any
    ) -> None:
        client = connected(address, rank, lanes=lanes)
        self.job = Job(client, rank, torch.device("cpu"))
        self.model = nn.Linear(WIDTH, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        plain = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.optimizer: ServerOptimizer = self.job.optimizer(plain, self.model, **options)
        self.set_rate(lr)

    def set_rate(self, lr: float) -> None:
        self.optimizer.param_groups[0]["lr"] = lr

    def step(self, gradient: float) -> None:
        """Step with a gradient of this value in all elements."""
        self.optimizer.zero_grad()
        (self.model(torch.ones(WIDTH)) * gradient).sum().backward()
        self.optimizer.step()


@contextmanager
def workers(address: str, *rates: float, **options: Any) -> Iterator[list[Worker]]:
    made: list[Worker] = []
    try:
        for rank, lr in enumerate(rates):
            made.append(Worker(address, rank, lr, **options))
        yield made
    finally:
        for worker in made:
            worker.job.close()


def assert_weights(address: str, value: float) -> None:
    torch.testing.assert_close(
        torch.tensor(weights_of(address)["weight"]), torch.full((1, WIDTH), value)
    )


@pytest.mark.every(2)
@each_lane
@pytest.mark.parametrize("policy", FREE_RUNNING.values(), ids=FREE_RUNNING)
def test_a_worker_with_rate_zero_moves_nothing(
    cluster: Make, policy: dict[str, Any], lanes: str
) -> None:
    address = cluster(2, **policy).address
    with workers(address, 0.1, 0.0, lanes=lanes) as (moving, unmoving):
        for step in range(4):
            moving.set_rate(0.1 * (1 + step % 2))
            moving.step(0.0)
            unmoving.step(1.0)
        assert_weights(address, 0.0)

        moving.step(1.0)
        assert_weights(address, -0.2)


@pytest.mark.parametrize("option", ["overlap", "pipeline"])
def test_each_push_has_its_own_rate_whichever_way_it_travels(cluster: Make, option: str) -> None:
    address = cluster(2, policy="async").address
    with workers(address, 0.5, 0.0, **{option: True}) as (moving, unmoving):
        for worker in (moving, unmoving, unmoving, moving, unmoving):
            worker.step(1.0)
            worker.job.wait()

        assert_weights(address, -1.0)


def test_pushes_without_hyper_parameters_use_those_of_the_update_before(cluster: Make) -> None:
    """The framework-free client sends none."""
    address = cluster(1, policy="async").address
    with workers(address, 0.5) as (worker,), psworker.Client(address, rank=1) as client:
        weights = {"weight": torch.zeros(1, WIDTH).numpy()}
        client.register(weights, psworker.OptimizerSpec("sgd", lr=1.0))
        worker.set_rate(0.25)
        worker.step(1.0)
        client.pull()
        client.push({"weight": torch.ones(1, WIDTH).numpy()})

        assert_weights(address, -0.5)


def run_round(*made: Worker) -> None:
    together(*[lambda worker=worker: worker.step(1.0) for worker in made])


def test_a_late_worker_does_not_set_the_rate_back(
    cluster: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    address = cluster(2).address
    first = Worker(address, 1, lr=1.0)
    schedule = StepLR(first.optimizer, step_size=1, gamma=0.5)
    for _ in range(2):
        first.step(1.0)
        schedule.step()
    assert_weights(address, -1.5)

    late = Worker(address, 0, lr=1.0)  # of a smaller rank: summed first
    for _ in range(3):
        run_round(first, late)
    assert_weights(address, -1.5 - 3 * 0.25)

    (record,) = records_of(caplog, "hyper_parameters_differ")
    assert isinstance(record.msg, Event)
    fields = dict(record.msg.fields)
    assert "job.resume(scheduler)" in fields.pop("remedy")
    assert fields == {"worker": late.job.client.worker, "own": "lr 1.0", "used": "lr 0.25"}
    together(first.job.close, late.job.close)


def test_job_resume_gives_a_late_worker_the_same_rate(
    cluster: Make, caplog: pytest.LogCaptureFixture
) -> None:
    address = cluster(1).address
    first = Worker(address, 0, lr=1.0)
    schedule = StepLR(first.optimizer, step_size=1, gamma=0.5)
    first.step(1.0)
    schedule.step()

    late = Worker(address, 1, lr=1.0)
    late.job.resume(StepLR(late.optimizer, step_size=1, gamma=0.5))
    run_round(first, late)

    assert_weights(address, -1.5)
    assert not records_of(caplog, "hyper_parameters_differ")
    together(first.job.close, late.job.close)


def test_the_member_that_joined_next_decides_when_the_first_has_left(cluster: Make) -> None:
    address = cluster(1, min_workers=3).address
    first, second, third = together(
        *[lambda rank=rank: Worker(address, rank, lr=0.0) for rank in range(3)]
    )
    by_number = sorted((first, second, third), key=lambda worker: worker.job.client.worker)
    for worker, lr in zip(by_number, (1.0, 0.5, 0.25), strict=True):
        worker.set_rate(lr)
    run_round(*by_number)
    assert_weights(address, -1.0)

    by_number[0].job.close()
    run_round(*by_number[1:])
    assert_weights(address, -1.5)
    together(*[worker.job.close for worker in by_number[1:]])


def make_updates(address: str) -> None:
    """Make updates in which the pushes have different rates; the first worker is of rank 1."""
    first, second = Worker(address, 1, lr=1.0), Worker(address, 0, lr=0.5)
    for step in range(4):
        first.set_rate(1.0 / (1 + step))
        together(lambda: first.step(1.0), lambda: second.step(3.0))
    together(first.job.close, second.job.close)


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_replayed_log_gives_each_update_its_rate(
    cluster: Make, tmp_path: Path, policy: str
) -> None:
    settings = {"policy": policy, "data_dir": tmp_path, "durability": "log"}
    servers = cluster(2, **settings)
    make_updates(servers.address)
    before = digest(servers.address)
    servers.close()

    again = cluster(2, **settings)

    until(lambda: status(again.address)["state"] != "waiting for servers", "both servers")
    assert digest(again.address) == before


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_standby_gives_each_update_its_rate(cluster: Make, policy: str) -> None:
    server = cluster(policy=policy).servers[0]
    with RunningStandby(server) as following:
        following.in_sync()
        make_updates(server.address)
        standby_state = following.standby._standby_state
        assert standby_state is not None
        store, own = standby_state.shard_state.loaded_store, server.engine.live.store
        assert own is not None
        version = server.engine.live.version
        until(lambda: standby_state.version == version, "all updates")

        assert checksum(store) == checksum(own)
        assert store.groups() == own.groups()
