"""Servers with a disk each, of which one is empty: no server trains on without the lost state."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pscommon.core.errors import MismatchError, SnapshotError
from psserver.server import Server
from tests.support.cluster import Cluster
from tests.support.workers import count, counted, counter

Make = Callable[..., Cluster]


def start(make: Make, folder: Path, **settings: Any) -> Cluster:
    """Start two servers with a data directory each."""
    servers = make(0)
    for shard in (0, 1):
        servers.add(shard, 2, **{"data_dir": folder / str(shard), "job": "otter", **settings})
    return servers


def train(make: Make, folder: Path, pushes: int = 3, **settings: Any) -> None:
    """Push; then the servers end with a snapshot."""
    servers = start(make, folder, **settings)
    with counter(servers.address) as client:
        count(client, pushes)
    servers.stop()
    servers.close()


def failure_of(server: Server) -> Exception | None:
    assert server.ended.wait(20)
    return server.failure


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_directory_ends_the_job_and_leaves_the_others(
    cluster: Make, tmp_path: Path, lost: int
) -> None:
    """Also if the servers start again and again, as pods do. The old directory repairs it."""
    train(cluster, tmp_path)
    (tmp_path / str(lost)).rename(tmp_path / "lost")
    parts = sorted((tmp_path / str(1 - lost)).rglob("shard-*"))
    for _ in range(2):
        servers = start(cluster, tmp_path)
        for server in servers.servers:
            failure = failure_of(server)
            assert isinstance(failure, SnapshotError)
            assert failure.reason == "NO_SNAPSHOT"
        servers.close()

    assert parts
    assert sorted((tmp_path / str(1 - lost)).rglob("shard-*")) == parts
    shutil.rmtree(tmp_path / str(lost))
    (tmp_path / "lost").rename(tmp_path / str(lost))
    with counter(start(cluster, tmp_path).address) as client:
        assert counted(client.pull()) == 3


def test_a_job_with_a_generated_name_is_not_replaced_either(cluster: Make, tmp_path: Path) -> None:
    """The name in the other directory is enough to see it."""
    train(cluster, tmp_path, job=None)
    shutil.rmtree(tmp_path / "0")

    failure = failure_of(start(cluster, tmp_path, job=None).servers[1])

    assert isinstance(failure, MismatchError)
    assert failure.reason == "JOB_MISMATCH"
    assert [*(tmp_path / "1").rglob("shard-*")]


def test_a_shard_refuses_a_new_job_while_it_runs(cluster: Make, tmp_path: Path) -> None:
    """Shard 0 is replaced by one with an empty directory."""
    train(cluster, tmp_path)
    servers = start(cluster, tmp_path)
    with counter(servers.address) as client:
        count(client)
    first = servers.servers.pop(0)
    bind = first.address
    first.close()
    shutil.rmtree(tmp_path / "0")

    servers.add(0, 2, data_dir=tmp_path / "0", bind=bind, job="otter")

    assert all(isinstance(failure_of(server), SnapshotError) for server in servers.servers)


def test_resume_never_on_all_servers_starts_over(cluster: Make, tmp_path: Path) -> None:
    train(cluster, tmp_path)
    shutil.rmtree(tmp_path / "0")

    servers = start(cluster, tmp_path, resume="never")

    with counter(servers.address) as client:
        count(client)
        assert counted(client.pull()) == 1
