"""A disk that has lost acknowledged data: no server continues with another history than
the others.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pscommon.settings.values import SnapshotEvery
from psworker import Client
from tests.support.cluster import Cluster
from tests.support.events import records_of
from tests.support.workers import count, counted, counter, until

Make = Callable[..., Cluster]
LOGS = ("log-job", "log-shard-0", "log-shard-1")


def trained(make: Make, data_dir: Path, pushes: int, save: bool = False) -> None:
    """Push some more times; then the servers end."""
    servers = make(
        2, data_dir=data_dir, snapshot_every=SnapshotEvery(seconds=3600), durability="log"
    )
    with counter(servers.address) as client:
        if save:
            servers.servers[0].service.snapshot_scheduler.save(30)  # type: ignore[union-attr]
        count(client, pushes)
    servers.close()


def version_of(client: Client) -> int:
    return counted(client.pull())


@pytest.mark.every(3)
@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("name", LOGS)
def test_a_log_without_its_end_is_not_continued(
    cluster: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, saved: bool
) -> None:
    """All servers roll back to the newest snapshot, or start again without one, and log it."""
    trained(cluster, tmp_path, 2)
    trained(cluster, tmp_path, 1, save=saved)
    shutil.copytree(tmp_path / name, tmp_path / "older")
    trained(cluster, tmp_path, 2)
    assert "job_log_unusable" not in caplog.text
    shutil.rmtree(tmp_path / name)
    (tmp_path / "older").rename(tmp_path / name)

    servers = cluster(2, data_dir=tmp_path, durability="log")
    directory = servers.servers[0].service.directory  # type: ignore[union-attr]
    until(lambda: not directory.missing, "servers that go on together")

    lost = ("job_log_unusable", "shard_log_unusable")
    back = ("rollback_started", "job_restarted_without_snapshot")
    assert records_of(caplog, *lost, *back)
    with counter(servers.address) as client:
        assert version_of(client) == (2 if saved else 0)
        count(client)
        assert version_of(client) == (3 if saved else 1)
