"""Long jobs with many departed workers: the status stays small, and worker numbers never repeat."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pscommon.core.limits import WORKERS_PER_GENERATION
from psproto.v1 import coordinator_pb2 as co
from psserver.coordinator.service import CoordinatorService
from psserver.coordinator.worker_handlers import add_member, leave
from psserver.core.commands.recorder import MAX_DEPARTED_COUNT
from psserver.core.commands.worker_commands import Join
from psserver.waiting import ThreadWaiter, run
from psworker.ctl.job_client import CoordinatorClient
from tests.support.cluster import Cluster
from tests.support.metrics_scrape import Metrics
from tests.support.workers import count, counted, counter, snapshots, status, until

Make = Callable[..., Cluster]

JOINS = 2000


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
