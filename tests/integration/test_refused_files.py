"""Files of a data directory that the disk refuses while the job runs: the job continues."""

from collections.abc import Callable
from pathlib import Path

import pytest

from psserver.process.generation_file import GENERATION, GenerationFile
from tests.support.cluster import Cluster
from tests.support.events import events
from tests.support.workers import count, counter, until


def refuse(path: Path) -> None:
    """Make further writes of this file fail."""
    path.unlink()
    path.mkdir()


@pytest.mark.full
def test_all_shards_roll_back_although_the_generation_cannot_be_stored(
    cluster: Callable[..., Cluster], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No worker gets the number of another one; the generation is stored as soon as the
    disk works.
    """
    servers = cluster(2, policy="async", data_dir=tmp_path)
    service, snapshots = servers.servers[0].service, servers.servers[0].snapshots
    assert service is not None
    with counter(servers.address) as client:
        count(client, 2)
        service.snapshot_scheduler.save(20)
        numbers = [client.worker]
    refuse(tmp_path / GENERATION)

    for starts in (1, 2):
        servers.servers.pop().close()
        servers.add(1, 2, data_dir=tmp_path)
        until(lambda starts=starts: snapshots.generations.number == starts, "all go back")  # type: ignore[misc]
        with counter(servers.address) as client:
            numbers.append(client.worker)
            count(client, 1)

    assert len(set(numbers)) == 3
    assert "start_not_counted" in events(caplog)
    (tmp_path / GENERATION).rmdir()
    service.snapshot_scheduler.save(20)
    assert snapshots.generations.number == 2
    assert GenerationFile(tmp_path).count_up(0) == 3
