"""Jobs resume from snapshots, on any number of servers, and choose the snapshot."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from pscommon.core.errors import FencedError, SnapshotError
from pscommon.snapshot import SnapshotDirectory
from tests.support.cluster import Cluster
from tests.support.events import events, records_of
from tests.support.snapshot_files import flip
from tests.support.snapshot_schedule import EVERY_5_STEPS, wait_for_snapshots
from tests.support.workers import (
    VERSIONS,
    count,
    counted,
    counter,
    digest,
    snapshots,
    status,
    together,
    train,
    training,
    until,
    weights_of,
)

Make = Callable[..., Cluster]


@contextmanager
def finished(cluster: Cluster) -> Iterator[str]:
    """Return the address of a job that is trained to the end."""
    train(cluster.address)
    assert status(cluster.address)["version"] == VERSIONS
    yield cluster.address


@pytest.fixture(scope="module")
def uninterrupted_weights() -> str:
    """Return the weights of an uninterrupted training on two servers."""
    cluster = Cluster(2, min_workers=2)
    try:
        train(cluster.address)
        return digest(cluster.address)
    finally:
        cluster.close()


def train_and_kill(make: Make, shards: int, data_dir: Path, version: int) -> None:
    """Train up to a version, then kill the servers."""
    cluster = make(shards, min_workers=2, data_dir=data_dir, snapshot_every=EVERY_5_STEPS)
    train(cluster.address, stop_at=version, each=wait_for_snapshots(cluster.address))
    cluster.close()


# ---- resume --------------------------------------------------------------------------------------


def test_a_resumed_training_ends_with_the_same_weights(
    cluster: Make, tmp_path: Path, uninterrupted_weights: str
) -> None:
    train_and_kill(cluster, 2, tmp_path, version=7)  # two versions after the snapshot

    again = cluster(2, min_workers=2, data_dir=tmp_path)

    assert status(again.address)["version"] == 5
    with finished(again) as address:
        assert digest(address) == uninterrupted_weights
        (loop,) = status(address)["data"]
        assert (loop["committed"], loop["total"]) == (30, 30)


def test_changing_from_two_to_three_to_one_server_changes_no_bit(
    cluster: Make, tmp_path: Path, uninterrupted_weights: str
) -> None:
    train_and_kill(cluster, 2, tmp_path, version=6)
    three = cluster(3, min_workers=2, data_dir=tmp_path, snapshot_every=EVERY_5_STEPS)
    train(three.address, stop_at=11, each=wait_for_snapshots(three.address))
    three.close()

    one = cluster(1, min_workers=2, data_dir=tmp_path)

    assert status(one.address)["version"] == 10
    with finished(one) as address:
        assert digest(address) == uninterrupted_weights


def test_a_restarted_finished_job_has_nothing_left(cluster: Make, tmp_path: Path) -> None:
    first = cluster(2, min_workers=2, data_dir=tmp_path)
    train(first.address)
    before = digest(first.address)
    first.stop()

    again = cluster(2, min_workers=2, data_dir=tmp_path)
    train(again.address)

    assert (status(again.address)["version"], digest(again.address)) == (VERSIONS, before)


@pytest.mark.full
@pytest.mark.parametrize("durability", ["snapshot", "log"])
def test_a_run_that_all_workers_left_waits_for_the_same_number(
    cluster: Make, tmp_path: Path, uninterrupted_weights: str, durability: str
) -> None:
    """The first worker would otherwise train alone, with other weights each time."""
    settings = {"min_workers": 2, "data_dir": tmp_path, "durability": durability}
    first = cluster(2, **settings)
    train(first.address, stop_at=7)
    first.stop()
    again = cluster(2, **settings)

    def comes_late() -> int:
        until(
            lambda: "idle" in [row["phase"] for row in status(again.address)["workers"]],
            "a wait for the second",
        )
        return training(again.address, 1)

    together(lambda: training(again.address, 0), comes_late)
    assert digest(again.address) == uninterrupted_weights


@pytest.mark.full
def test_pushes_from_before_a_restart_do_not_count_again(cluster: Make, tmp_path: Path) -> None:
    """A worker that slept through the restart gets an error, and may rejoin."""
    first = cluster(1, data_dir=tmp_path)
    sleeper = counter(first.address, connect_timeout=1.0)
    count(sleeper, 4)
    first.stop()
    again = cluster(1, data_dir=tmp_path, bind=sleeper.addresses[0])

    with pytest.raises(FencedError), sleeper:
        sleeper.push({name: np.ones_like(array) for name, array in sleeper.weights.items()})

    assert counted(weights_of(again.address)) == 4
    with counter(again.address) as client:
        count(client)
        assert counted(client.pull()) == 5


def test_a_lost_shard_rolls_all_back_to_the_newest_snapshot(
    cluster: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    servers = cluster(2, data_dir=tmp_path, snapshot_every=EVERY_5_STEPS)
    with counter(servers.address) as client:
        count(client, 5)
        until(lambda: 5 in snapshots(servers.address), "a snapshot")
        count(client, 2)

    lost = servers.servers.pop()
    lost.close()
    servers.add(1, 2, data_dir=tmp_path, bind=lost.address)
    until(
        lambda: status(servers.address)["state"] == "waiting for workers",
        "a job that waits for its workers",
    )

    assert "rollback_started" in events(caplog)
    with counter(servers.address) as client:
        assert counted(client.pull()) == 5
        count(client, 2)
        assert counted(client.pull()) == 7


# ---- choice of the snapshot ----------------------------------------------------------------------


def test_a_damaged_newest_snapshot_is_skipped_with_a_warning(
    cluster: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, uninterrupted_weights: str
) -> None:
    train_and_kill(cluster, 2, tmp_path, version=12)
    (part,) = SnapshotDirectory(tmp_path).path(10).glob("shard-1-*")
    flip(part)

    again = cluster(2, min_workers=2, data_dir=tmp_path)

    assert status(again.address)["version"] == 5
    (skipped,) = records_of(caplog, "snapshot_damaged")
    assert str(part) in skipped.__dict__["problem"]
    with finished(again) as address:
        assert digest(address) == uninterrupted_weights


def test_with_only_damaged_snapshots_the_job_does_not_start(cluster: Make, tmp_path: Path) -> None:
    train_and_kill(cluster, 1, tmp_path, version=11)
    for part in SnapshotDirectory(tmp_path).folder.glob("*/shard-*"):
        flip(part)

    with pytest.raises(SnapshotError) as caught:
        cluster(1, data_dir=tmp_path)

    assert (caught.value.exit_code, caught.value.reason) == (12, "NO_SNAPSHOT")
    assert SnapshotDirectory(tmp_path).versions() == [5, 10]  # no snapshot was removed


def test_resume_never_starts_afresh_and_moves_old_snapshots_aside(
    cluster: Make, tmp_path: Path
) -> None:
    train_and_kill(cluster, 1, tmp_path, version=6)

    again = cluster(1, data_dir=tmp_path, resume="never")

    assert status(again.address)["version"] == 0
    assert status(again.address)["state"] == "waiting for a model"
    assert [path.name for path in SnapshotDirectory(tmp_path).folder.iterdir()] == [
        "000000000005.aside-1"
    ]


def test_resume_with_a_version_starts_there(
    cluster: Make, tmp_path: Path, uninterrupted_weights: str
) -> None:
    train_and_kill(cluster, 2, tmp_path, version=12)

    again = cluster(2, min_workers=2, data_dir=tmp_path, resume=5)

    assert status(again.address)["version"] == 5
    assert SnapshotDirectory(tmp_path).versions() == [5]
    with finished(again) as address:
        assert digest(address) == uninterrupted_weights


def test_a_missing_version_is_refused(cluster: Make, tmp_path: Path) -> None:
    train_and_kill(cluster, 1, tmp_path, version=6)

    with pytest.raises(SnapshotError, match=r"version 4 .*\[5\]") as caught:
        cluster(1, data_dir=tmp_path, resume=4)

    assert (caught.value.exit_code, caught.value.reason) == (12, "NO_SNAPSHOT")
