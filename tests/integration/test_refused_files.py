"""Files of a data directory that the disk refuses while the job runs: it goes on all the same."""

from collections.abc import Callable
from pathlib import Path

import pytest

from psserver.process.generation_file import GENERATION, GenerationFile
from tests.support.cluster import Cluster
from tests.support.events import events
from tests.support.workers import count, counter, until


def refuse(path: Path) -> None:
    """From now on nobody can write this file."""
    path.unlink()
    path.mkdir()


def test_all_go_back_where_that_cannot_be_counted(
    cluster: Callable[..., Cluster], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No worker gets a number that another one had; the count is written down as soon as the
    disk takes it.
    """
    servers = cluster(2, policy="async", data_dir=tmp_path)
    hub, archive = servers.servers[0].service, servers.servers[0].snapshots
    assert hub is not None
    with counter(servers.address) as client:
        count(client, 2)
        hub.snapshot_scheduler.save(20)
        numbers = [client.worker]
    refuse(tmp_path / GENERATION)

    for starts in (1, 2):
        servers.servers.pop().close()
        servers.add(1, 2, data_dir=tmp_path)
        until(lambda starts=starts: archive.generations.number == starts, "all go back")  # type: ignore[misc]
        with counter(servers.address) as client:
            numbers.append(client.worker)
            count(client, 1)

    assert len(set(numbers)) == 3
    assert "start_not_counted" in events(caplog)
    (tmp_path / GENERATION).rmdir()
    hub.snapshot_scheduler.save(20)
    assert archive.generations.number == 2
    assert GenerationFile(tmp_path).count_up(0) == 3
