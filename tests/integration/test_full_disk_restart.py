"""Servers that restart on a full disk, or with files missing from the coordinator's log."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pscommon.settings.values import SnapshotEvery
from tests.support.cluster import Cluster
from tests.support.events import records_of
from tests.support.metrics_scrape import Metrics
from tests.support.small_disk import SmallDisk, missing
from tests.support.workers import count, counted, counter, until

Make = Callable[..., Cluster]

RARELY = SnapshotEvery(seconds=3600)
LOG = {
    "durability": "log",
    "log_fsync": "always",
    "snapshot_every": RARELY,
    "metrics_bind": "127.0.0.1:0",
}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    if reason := missing(tmp_path):
        pytest.skip(reason)
    with SmallDisk(tmp_path / "disk", 1 << 20) as disk:
        yield disk


def trained(make: Make, data_dir: Path, pushes: int, save: bool = False, **settings: Any) -> None:
    """Push a number of times, optionally after a snapshot, then end the servers as by a kill."""
    servers = make(2, data_dir=data_dir, **settings)
    with counter(servers.address) as client:
        count(client)
        if save:
            servers.servers[0].service.snapshot_scheduler.save(30)  # type: ignore[union-attr]
        count(client, pushes - 1)
    servers.close()


def ready(servers: Cluster) -> Cluster:
    directory = servers.servers[0].service.directory  # type: ignore[union-attr]
    until(lambda: not directory.missing, "servers that continue together")
    return servers


@pytest.mark.parametrize("durability", ["log", "snapshot"])
def test_a_job_restarts_on_a_disk_without_a_free_byte(
    cluster: Make, small_disk: SmallDisk, durability: str
) -> None:
    """With a log nothing is lost, with snapshots it resumes from the newest; twice, then it trains
    on.
    """
    settings = LOG | {"durability": durability}
    trained(cluster, small_disk.path, 4, save=True, **settings)
    version = 4 if durability == "log" else 1
    for start in (1, 2):
        small_disk.fill()
        assert small_disk.free_bytes == 0
        servers = ready(cluster(2, data_dir=small_disk.path, **settings))
        assert servers.servers[0].snapshots.generations.number >= start
        with counter(servers.address) as client:
            assert counted(client.pull()) == version
            assert client.worker > start * 10_000
        servers.close()


def erased(data_dir: Path, what: str) -> None:
    """Remove the coordinator's newest log file, or its whole folder; return it."""
    if what == "folder":
        shutil.rmtree(data_dir / "log-job")
    else:
        max((data_dir / "log-job").glob("*.log")).unlink()


@pytest.mark.every(3)
@pytest.mark.parametrize("durability", ["log", "snapshot"])
@pytest.mark.parametrize("what", ["newest file", "folder"])
@pytest.mark.parametrize("segments", [1, 2])
def test_a_missing_coordinator_log_file_is_an_error_with_the_lost_updates(
    cluster: Make,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    what: str,
    segments: int,
    durability: str,
) -> None:
    """Shard 0's own log shows how far the job was. segments: in the log since the snapshot."""
    trained(cluster, tmp_path, 4, save=True, **LOG)
    for _ in range(segments - 1):
        trained(cluster, tmp_path, 2, **LOG)
    lost = 4 + 2 * (segments - 1) - 1
    erased(tmp_path, what)
    if (durability, what, segments) == ("snapshot", "newest file", 2):
        # refused, with exit code 2: the older file still holds updates that are in no snapshot
        return

    servers = ready(cluster(2, data_dir=tmp_path, **LOG | {"durability": durability}))

    (record,) = records_of(caplog, "job_log_unusable")
    assert record.levelname == "ERROR"
    assert record.__dict__["updates_lost"] == lost
    assert record.__dict__["version"] == 1
    with counter(servers.address) as client:
        assert counted(client.pull()) == 1
    assert Metrics(servers.servers[0].monitor.address)("ps_updates_lost_total") == lost


def test_without_a_snapshot_a_missing_log_costs_all_updates(
    cluster: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(cluster, tmp_path, 3, **LOG)
    erased(tmp_path, "folder")

    servers = ready(cluster(2, data_dir=tmp_path, **LOG))

    (record,) = records_of(caplog, "job_log_unusable")
    assert record.__dict__["updates_lost"] == 3
    assert "files of it are missing" in record.__dict__["problem"]
    with counter(servers.address) as client:
        assert counted(client.pull()) == 0


@pytest.mark.full
def test_a_deliberately_abandoned_log_is_not_missed(
    cluster: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run without logs in between, or a new job in the same folder, voids the old logs."""
    trained(cluster, tmp_path, 5, save=True, **LOG)
    trained(cluster, tmp_path, 2, save=True, **LOG | {"durability": "snapshot", "resume": "never"})
    trained(cluster, tmp_path, 2, **LOG)
    trained(cluster, tmp_path, 2, **LOG | {"resume": "never"})

    assert records_of(caplog, "job_log_unusable") == []
