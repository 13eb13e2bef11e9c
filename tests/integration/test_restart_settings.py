"""Servers restarted on their data with a policy set by the operator, or with other flags."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pscommon.core.errors import InvalidRequestError, MismatchError, NonFiniteError
from psworker import Client, QuarantinedError
from psworker.ctl.job_client import CoordinatorClient
from tests.support.cluster import Cluster
from tests.support.events import events, records_of
from tests.support.workers import ONES, count, counted, counter, status, until, weights_of

Make = Callable[..., Cluster]
both = pytest.mark.parametrize("durability", ["snapshot", "log"])


def saved(servers: Cluster, client: Client, more: int) -> None:
    """Push twice, take a snapshot, and push again this often."""
    count(client, 2)
    with CoordinatorClient([servers.address], 10.0) as asked:
        asked.save(10.0)
    count(client, more)


def set_policy(servers: Cluster, name: str, staleness: int | None = None) -> None:
    with CoordinatorClient([servers.address], 10.0) as asked:
        asked.set_policy(name, staleness, None)


@both
def test_a_policy_set_by_a_command_applies_after_the_next_start(
    cluster: Make, tmp_path: Path, durability: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"data_dir": tmp_path, "durability": durability, "policy": "async"}
    servers = cluster(2, **settings)
    with counter(servers.address) as client:
        set_policy(servers, "ssp", 3)
        saved(servers, client, 1)
    servers.close()

    caplog.set_level("INFO", "psserver")
    for _ in range(2):
        caplog.clear()
        again = cluster(2, **settings)
        assert status(again.address)["policy"] == "ssp"
        logged = [record.__dict__.get("policy") for record in records_of(caplog, "listening")]
        assert logged == ["ssp", None]  # shard 1 does not know the policy
        with counter(again.address) as client:
            assert counted(client.pull()) == {"snapshot": 2, "log": 3}[durability]
        again.close()


@both
def test_another_policy_on_the_command_line_takes_precedence(
    cluster: Make, tmp_path: Path, durability: str
) -> None:
    settings = {"data_dir": tmp_path, "durability": durability}
    servers = cluster(2, **settings, policy="sync")
    with counter(servers.address) as client:
        set_policy(servers, "ssp", 3)
        saved(servers, client, 1)
    servers.close()

    for _ in range(2):
        again = cluster(2, **settings, policy="async", max_staleness=7)
        assert (status(again.address)["policy"], status(again.address)["max_staleness"]) == (
            "async",
            7,
        )
        with counter(again.address) as client:
            assert counted(client.pull()) == {"snapshot": 2, "log": 3}[durability]
        again.close()


def test_the_log_is_replayed_with_its_own_settings(cluster: Make, tmp_path: Path) -> None:
    """Otherwise the log of shard 0 would differ from the others, and no shard could follow it."""
    settings = {"data_dir": tmp_path, "durability": "log", "bad_gradients": "skip"}
    bad = {name: np.full_like(one, np.nan) for name, one in ONES.items()}
    servers = cluster(2, **settings)
    with counter(servers.address) as client:
        count(client, 2)
        assert client.push(bad).status == "rejected"
        count(client, 2)
    servers.close()

    again = cluster(2, **settings, quarantine_after=1)
    with counter(again.address) as client:
        assert counted(client.pull()) == 4
        count(client)
        with pytest.raises(QuarantinedError):
            client.push(bad)
    again.close()

    assert counted(weights_of(cluster(2, **settings).address)) == 5


def test_a_failed_job_continues_when_its_servers_restart(cluster: Make, tmp_path: Path) -> None:
    """Also with a snapshot from before the failure, so that the log has the reason."""
    settings = {"data_dir": tmp_path, "durability": "log"}
    bad = {name: np.full_like(one, np.nan) for name, one in ONES.items()}
    servers = cluster(2, **settings)
    with counter(servers.address) as client:
        saved(servers, client, 0)
        assert client.push(bad).status == "rejected"
    assert servers.servers[0].ended.wait(10.0)
    assert isinstance(servers.servers[0].failure, NonFiniteError)
    servers.close()

    for start in range(2):
        again = cluster(2, **settings)
        with counter(again.address) as client:
            assert counted(client.pull()) == 2 + start
            count(client)
        again.close()


def test_all_shards_check_gradients_with_the_settings_of_shard_0(
    cluster: Make, tmp_path: Path
) -> None:
    """Otherwise a norm would include only the servers with the same flags."""
    settings = {"data_dir": tmp_path, "durability": "log"}
    bad = {**ONES, "b": np.where(np.arange(100) == 99, np.nan, ONES["b"])}
    norm = float(np.sqrt(sum(one.size for one in ONES.values())))
    servers = cluster(0)
    servers.add(0, 2, **settings, bad_gradients="clip", max_norm=1.0)
    servers.add(1, 2, **settings)
    with counter(servers.address) as client:
        count(client)
        for weights in client.pull().values():
            np.testing.assert_allclose(weights, -1.0 / norm, rtol=1e-6)
        assert client.push(bad).status == "applied"
    servers.close()

    again = cluster(2, **settings)
    with counter(again.address) as client:
        before = client.pull()
        count(client)
        for name, weights in client.pull().items():
            np.testing.assert_allclose(weights, before[name] - 1.0, rtol=1e-6)
        assert client.push(bad).status == "rejected"


@pytest.mark.parametrize("snapshot", [True, False])
@pytest.mark.parametrize(
    ("shards", "durability", "remedy"),
    [
        (2, "snapshot", "`--durability log`"),
        (3, "log", "start 2 servers"),
    ],
)
def test_updates_in_the_log_alone_are_not_abandoned_silently(
    cluster: Make, tmp_path: Path, shards: int, durability: str, remedy: str, snapshot: bool
) -> None:
    servers = cluster(2, data_dir=tmp_path, durability="log")
    with counter(servers.address) as client:
        if snapshot:
            saved(servers, client, 3)
        else:
            count(client, 5)
    servers.close()
    other = {"data_dir": tmp_path, "durability": durability}

    with pytest.raises(
        InvalidRequestError, match=f"updates {3 if snapshot else 1} to 5 .* {remedy}"
    ):
        cluster(shards, **other)

    again = cluster(2, data_dir=tmp_path, durability="log")
    assert counted(weights_of(again.address)) == 5
    again.close()
    given_up = cluster(shards, **other, resume=2 if snapshot else "never")
    with counter(given_up.address) as client:
        assert counted(client.pull()) == (2 if snapshot else 0)
        count(client)
    given_up.close()
    if snapshot and durability == "snapshot":  # the abandoned log is never continued
        assert (
            counted(weights_of(cluster(shards, data_dir=tmp_path, durability="log").address)) == 2
        )


def test_after_a_snapshot_of_all_the_servers_need_no_log(cluster: Make, tmp_path: Path) -> None:
    servers = cluster(2, data_dir=tmp_path, durability="log")
    with counter(servers.address) as client:
        count(client, 5)
    servers.stop()

    again = cluster(3, data_dir=tmp_path)
    assert counted(weights_of(again.address)) == 5


@both
def test_a_shard_0_with_the_disk_of_another_shard_starts_no_job(
    cluster: Make, tmp_path: Path, durability: str
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    settings = {"durability": durability}
    servers = cluster(0)
    servers.add(0, 2, data_dir=first, **settings)
    servers.add(1, 2, data_dir=second, **settings)
    with counter(servers.address) as client:
        saved(servers, client, 0)
    servers.close()

    with pytest.raises(MismatchError) as caught:
        cluster(2, data_dir=second, **settings)

    assert (caught.value.reason, caught.value.exit_code) == ("SHARD_MISMATCH", 11)
    servers.add(0, 2, data_dir=first, **settings)
    servers.add(1, 2, data_dir=second, **settings)
    assert counted(weights_of(servers.address)) == 2
    assert status(cluster(1, data_dir=second, **settings, resume="never").address)["version"] == 0


def test_a_job_starts_from_copied_snapshots(cluster: Make, tmp_path: Path) -> None:
    servers = cluster(2, data_dir=tmp_path / "one")
    with counter(servers.address) as client:
        saved(servers, client, 1)
    shutil.copytree(tmp_path / "one" / "snapshots", tmp_path / "other" / "snapshots")

    assert counted(weights_of(cluster(2, data_dir=tmp_path / "other").address)) == 2


def test_a_shard_without_a_log_reports_that_shard_0_has_one(
    cluster: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Shard 2 is a further one, which the job may get."""
    servers = cluster(0)
    for shard, flags in enumerate(({"durability": "log"}, {"durability": "log"}, {})):
        servers.add(shard, max(2, shard + 1), data_dir=tmp_path, **flags)
        link = servers.servers[shard].coordinator_link
        until(lambda link=link: link is None or link._is_connected, "its line")
        assert ("shard_log_missing" in events(caplog)) is (shard == 2)
