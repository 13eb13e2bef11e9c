"""Servers that connect to another job than their own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pscommon.core.errors import MismatchError
from pscommon.snapshot import SnapshotDirectory
from tests.support.cluster import Cluster
from tests.support.workers import count, counter

Make = Callable[..., Cluster]


def test_servers_of_another_job_are_refused_and_lose_nothing(cluster: Make, tmp_path: Path) -> None:
    """Even if its shard 0 has the address of theirs: a data directory binds a server to its job."""
    otter, stoat = tmp_path / "otter", tmp_path / "stoat"
    servers = cluster(2, data_dir=otter)
    with counter(servers.address) as client:
        count(client, 3)
    servers.stop()
    others = cluster(0)
    others.add(0, 2, data_dir=stoat)
    strays: tuple[dict[str, Any], ...] = ({"data_dir": otter}, {"job": "otter"})
    for settings in strays:
        stray = others.add(1, 2, **settings)
        assert stray.ended.wait(10)
        assert isinstance(stray.failure, MismatchError)
        assert stray.failure.reason == "JOB_MISMATCH"
        others.servers.pop().close()

    others.add(1, 2, data_dir=stoat)
    with counter(others.address) as client:
        count(client, 5)
    others.stop()

    assert (SnapshotDirectory(otter).versions(), SnapshotDirectory(stoat).versions()) == ([3], [5])
    assert SnapshotDirectory(otter).verify(3) == SnapshotDirectory(stoat).verify(5) == []
