"""How many workers a job wants: the command, its record, status and metric."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pscommon.core.errors import InvalidRequestError
from psworker.ctl.cli import main as ps_ctl
from psworker.ctl.job_client import CoordinatorClient
from tests.support.cluster import Cluster
from tests.support.ctl_output import ctl
from tests.support.events import records_of
from tests.support.workers import count, counter, status, until

Make = Callable[..., Cluster]
Output = pytest.CaptureFixture[str]


def wanted_metric(servers: Cluster) -> float | None:
    registry = servers.servers[0].metrics.registry
    return registry.get_sample_value("ps_workers_wanted", {"shard": "0"})


def scale(servers: Cluster, workers: int) -> None:
    with CoordinatorClient([servers.address], 10.0) as asked:
        asked.scale_workers(workers)


def test_the_number_is_in_status_metric_and_log(
    cluster: Make, capsys: Output, caplog: pytest.LogCaptureFixture
) -> None:
    servers = cluster(1)
    caplog.set_level("INFO", "psserver")
    assert status(servers.address)["workers_wanted"] is None
    assert wanted_metric(servers) is None

    found = ctl(capsys, "--ps", servers.address, "scale", "workers", 3)

    assert found["workers_wanted"] == 3
    assert status(servers.address)["workers_wanted"] == 3
    until(lambda: wanted_metric(servers) == 3, "the metric")
    (record,) = records_of(caplog, "workers_wanted")
    assert (record.__dict__["workers"], record.__dict__["reason"]) == (3, "ps-ctl scale")


def test_fewer_workers_than_training_starts_with_are_refused_before_its_start(
    cluster: Make, capsys: Output
) -> None:
    servers = cluster(1, min_workers=2)

    with pytest.raises(InvalidRequestError, match="--min-workers"):
        scale(servers, 1)
    assert ps_ctl(["--ps", servers.address, "scale", "workers", "1"]) == 2
    assert "Try" in capsys.readouterr().err
    assert status(servers.address)["workers_wanted"] is None


@pytest.mark.parametrize("durability", ["snapshot", "log"])
def test_restarted_servers_want_the_same_number(
    cluster: Make, tmp_path: Path, durability: str
) -> None:
    settings = {"data_dir": tmp_path, "durability": durability}
    servers = cluster(2, **settings)
    with counter(servers.address) as client:
        count(client, 1)
        scale(servers, 3)
        with CoordinatorClient([servers.address], 10.0) as asked:
            asked.save(10.0)
        servers.close()

    assert status(cluster(2, **settings).address)["workers_wanted"] == 3


@pytest.mark.parametrize("durability", ["snapshot", "log"])
def test_a_new_run_does_not_want_the_number_of_the_last_one(
    cluster: Make, tmp_path: Path, durability: str
) -> None:
    settings = {"data_dir": tmp_path, "durability": durability}
    servers = cluster(2, **settings)
    with counter(servers.address) as client:
        count(client, 1)
        scale(servers, 3)
    servers.stop()

    assert status(cluster(2, **settings).address)["workers_wanted"] is None


def test_a_rollback_does_not_change_the_number(cluster: Make, tmp_path: Path) -> None:
    servers = cluster(2, data_dir=tmp_path)
    with counter(servers.address) as client:
        count(client, 1)
        with CoordinatorClient([servers.address], 10.0) as asked:
            version, _ = asked.save(10.0)
            asked.scale_workers(3)
            asked.restore(version, 10.0)

    assert status(servers.address)["workers_wanted"] == 3


def test_every_policy_takes_the_number(cluster: Make) -> None:
    for settings in ({"policy": "async"}, {"policy": "ssp", "staleness": 1}):
        servers = cluster(1, **settings)
        scale(servers, 5)
        assert status(servers.address)["workers_wanted"] == 5
