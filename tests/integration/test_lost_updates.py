"""Updates lost in a rollback are reported and counted, also if shard 0 itself was restarted."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pscommon.settings.values import SnapshotEvery
from psworker.ctl.cli import main
from psworker.ctl.job_client import CoordinatorClient
from tests.support.cluster import Cluster
from tests.support.metrics_scrape import Metrics
from tests.support.workers import count, counted, counter, snapshots, status, until

Make = Callable[..., Cluster]
STEPS = SnapshotEvery(steps=5)


def metrics(servers: Cluster) -> Metrics:
    monitor = servers.servers[0].monitor
    assert monitor is not None
    return Metrics(monitor.address)


def lost(servers: Cluster) -> float:
    return metrics(servers)("ps_updates_lost_total")


def test_a_restarted_coordinator_reports_and_counts_lost_updates_once(
    cluster: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It learns of them from the workers that return, however many they are."""
    settings = {"data_dir": tmp_path, "snapshot_every": STEPS, "policy": "async"}
    first = cluster(1, **settings)
    with counter(first.address) as client, counter(first.address) as other:
        count(client, 5)
        until(lambda: 5 in snapshots(first.address), "a snapshot")
        count(client, 2)
        count(other, 1)
        first.close()
        again = cluster(1, **settings, bind=client.addresses[0], metrics_bind="127.0.0.1:0")
        for each in (client, other, client):
            each.rejoin()
            count(each)

    assert lost(again) == 3
    logged = [record for record in caplog.records if "updates_lost" in record.__dict__]
    assert sum(record.__dict__["updates_lost"] for record in logged) == 3


def test_deliberately_abandoned_updates_are_not_reported_as_lost(
    cluster: Make, tmp_path: Path
) -> None:
    servers = cluster(1, data_dir=tmp_path, snapshot_every=STEPS, metrics_bind="127.0.0.1:0")
    with counter(servers.address) as client:
        count(client, 5)
        until(lambda: 5 in snapshots(servers.address), "a snapshot")
        count(client, 2)
        with CoordinatorClient([servers.address], 10.0) as asked:
            asked.restore(5, 10.0)
        client.rejoin()
        assert counted(client.pull()) == 5

    assert lost(servers) == 0


@pytest.mark.full
def test_workers_from_before_a_restart_do_not_count_as_lost(
    cluster: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No operator needs them, and only their numbers are known."""
    first = cluster(1, data_dir=tmp_path)
    with counter(first.address, rank=7) as client:
        count(client)
        first.stop()
        again = cluster(1, data_dir=tmp_path, bind=client.addresses[0], metrics_bind="127.0.0.1:0")
        client.rejoin()
        until(lambda: "ps_workers" in metrics(again).names, "a look at the workers")

    found = metrics(again)
    assert [found("ps_workers", state=state) for state in ("past", "lost")] == [1, 0]
    (past,) = [row for row in status(again.address)["workers"] if row["state"] == "past"]
    assert (past["rank"], past["host"], past["health"]) == (None, None, "past")
    assert main(["--ps", again.address, "workers"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "restarted" in line]
    assert line.split() == [
        "1",
        "past",
        "past",
        "0",
        "0",
        "0",
        "s",
        "0",
        "the",
        "job",
        "was",
        "restarted",
    ]
