"""What is lost with a return to a snapshot is told and counted, also where shard 0 itself was started again."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pscommon.values import SnapshotEvery
from psworker.ctl.servers import Servers
from tests.e2e.conftest import Cluster
from tests.e2e.scrape import Metrics
from tests.e2e.workers import count, counted, counter, snapshots, until

Make = Callable[..., Cluster]
STEPS = SnapshotEvery(steps=5)


def lost(servers: Cluster) -> float:
    monitor = servers.servers[0].monitor
    assert monitor is not None
    return Metrics(monitor.address)("ps_updates_lost_total")


def test_a_coordinator_that_is_started_again_tells_and_counts_what_is_lost(
    cluster: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It hears of it from the workers that come back, and counts it once, however many they are."""
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
    told = [record for record in caplog.records if "updates are lost" in record.message]
    assert sum(record.__dict__["updates_lost"] for record in told) == 3


def test_what_was_given_up_on_purpose_is_not_told_as_lost(cluster: Make, tmp_path: Path) -> None:
    servers = cluster(1, data_dir=tmp_path, snapshot_every=STEPS, metrics_bind="127.0.0.1:0")
    with counter(servers.address) as client:
        count(client, 5)
        until(lambda: 5 in snapshots(servers.address), "a snapshot")
        count(client, 2)
        with Servers([servers.address], 10.0) as asked:
            asked.restore(5, 10.0)
        client.rejoin()
        assert counted(client.pull()) == 5

    assert lost(servers) == 0
