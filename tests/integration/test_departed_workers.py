"""Long jobs with many departed workers: the status stays small, and worker numbers never repeat."""

import gc
import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from pscommon.core.data_loop import LoopSpec
from pscommon.core.limits import WORKERS_PER_GENERATION
from psproto.v1 import coordinator_pb2 as co
from psserver.coordinator.service import CoordinatorService
from psserver.coordinator.status import describe
from psserver.coordinator.worker_handlers import add_member, leave
from psserver.core.commands.data_commands import LeaseBatches
from psserver.core.commands.recorder import MAX_DEPARTED_COUNT
from psserver.core.commands.worker_commands import ForgetDeparted, Join, Lose, Register
from psserver.waiting import ThreadWaiter, run
from psworker.ctl.job_client import CoordinatorClient
from tests.support.cluster import Cluster
from tests.support.metrics_scrape import Metrics
from tests.support.workers import count, counted, counter, snapshots, status, until

Make = Callable[..., Cluster]

JOINS = 2000

MEMORY_GROWTH_BYTES = 100_000
"""Allowed for 5000 workers: 20 bytes each, less than any object has."""


def service_of(servers: Cluster) -> CoordinatorService:
    service = servers.servers[0].service
    assert service is not None
    return service


def join(service: CoordinatorService) -> int:
    """Join as a worker that leaves at once."""
    command = Join(None, "host", 1, "cpu")
    member = run(add_member(service, command, 0.0, ThreadWaiter()))
    assert member is not None
    leave(service, co.LeaveRequest(worker=member.worker))
    return member.worker


def test_the_status_stays_small_after_many_workers(cluster: Make) -> None:
    """Their number is still counted; an active worker is served as before."""
    servers = cluster(1, policy="async", metrics_bind="127.0.0.1:0")
    service, monitor = service_of(servers), servers.servers[0].monitor
    assert monitor is not None
    with counter(servers.address) as client:
        for _ in range(JOINS):
            join(service)
        found = until(
            lambda: (
                (now := status(servers.address))
                and len(now["workers"]) <= 2 * MAX_DEPARTED_COUNT + 1
                and now
            ),
            "forgotten workers",
        )
        until(
            lambda: Metrics(monitor.address)("ps_workers", state="left") == JOINS, "a count of all"
        )
        count(client, 2)
        assert counted(client.pull()) == 2

    assert len(json.dumps(found)) < 100_000


class Costs(NamedTuple):
    """What a job costs: bytes of Python objects, of the status and of the state on disk, and the
    CPU seconds of the joins before it.
    """

    memory: int
    status: int
    state: int
    seconds: float


def come_and_go(service: CoordinatorService, workers: int) -> Costs:
    """Let workers join, register, take a batch, and leave; every third one is lost."""
    model, do = service.executor.coordinator.job.model, service.executor.do
    assert model is not None
    began = time.thread_time()
    for number in range(workers):
        member = run(add_member(service, Join(number % 8, "host", 1, "cpu"), 0.0, ThreadWaiter()))
        assert member is not None
        worker = member.worker
        service.worker_keys.check(worker, service.worker_keys.key_of(worker))
        assert do(Register(worker, model)) == "ready"
        assert do(LeaseBatches(worker, LoopSpec(0, 100, 1), 0, 1, False)) is not None
        if number % 3:
            leave(service, co.LeaveRequest(worker=worker))
        else:
            do(Lose(worker, "a test"))
    seconds = time.thread_time() - began
    service.executor.do(ForgetDeparted(MAX_DEPARTED_COUNT))  # a tick does it above a number
    status, state = describe(service), service.executor.coordinator.complete_state()
    gc.collect()
    memory, _ = tracemalloc.get_traced_memory()
    return Costs(memory, len(json.dumps(status)), len(json.dumps(state)), seconds)


@pytest.mark.timing
def test_5000_joins_and_leaves_change_neither_memory_nor_sizes_nor_speed(cluster: Make) -> None:
    servers = cluster(1, policy="async", lease=600.0, metrics_bind="127.0.0.1:0")
    with counter(servers.address) as client:
        count(client, 1)
        tracemalloc.start()
        try:
            first, *_, last = [come_and_go(service_of(servers), 1000) for _ in range(6)]
        finally:
            tracemalloc.stop()
        count(client, 1)
        assert counted(client.pull()) == 2

    assert last.memory - first.memory < MEMORY_GROWTH_BYTES
    assert last.status < 1.05 * first.status
    assert last.state < 1.05 * first.state
    assert last.seconds < 1.5 * first.seconds


@pytest.mark.parametrize("durability", ["log", "snapshot"])
def test_worker_numbers_do_not_repeat_after_many_joins(
    cluster: Make, tmp_path: Path, durability: str
) -> None:
    """Neither after a rollback to an old snapshot nor after a restart of the servers."""
    settings = {"data_dir": tmp_path, "policy": "async", "durability": durability}
    servers = cluster(1, **settings)
    service, given = service_of(servers), []
    with counter(servers.address) as client:
        count(client, 3)
        with CoordinatorClient([servers.address], 10.0) as asked:
            asked.save(30.0)
        until(lambda: 3 in snapshots(servers.address), "a snapshot")
        service._coordinator.membership._next_worker = (
            WORKERS_PER_GENERATION - 1
        )  # as after many joins
        given += [join(service) for _ in range(5)]
        with CoordinatorClient([servers.address], 10.0) as asked:
            asked.restore(3, 30.0)
        given += [join(service) for _ in range(3)]
        service._coordinator.membership._next_worker = 4 * WORKERS_PER_GENERATION
        given += [join(service) for _ in range(3)]
        servers.close()
    again = service_of(cluster(1, **settings))
    given += [join(again) for _ in range(3)]

    assert len(set(given)) == len(given)
    assert given == sorted(given)


def test_worker_numbers_do_not_repeat_without_a_data_directory(cluster: Make) -> None:
    """A start of a log that is not on disk also takes a later generation."""
    servers = cluster(1, policy="async")
    service = service_of(servers)
    service._coordinator.membership._next_worker = WORKERS_PER_GENERATION
    given = [join(service) for _ in range(3)]
    service.snapshots.generations.count_in_running_job()

    assert service.snapshots.generations.number * WORKERS_PER_GENERATION >= max(given)
