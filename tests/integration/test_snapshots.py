"""Snapshots of running jobs: when they are taken, what they contain, and how a job resumes from
them.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pscommon.core.errors import SnapshotError
from pscommon.settings.values import SnapshotEvery
from pscommon.snapshot import SnapshotDirectory, SnapshotReader
from pscommon.snapshot.atomic_files import AtomicFiles
from psserver.durability.snapshots import WRITER_NICENESS
from psworker import Job
from tests.support.cluster import Cluster
from tests.support.events import events, records_of
from tests.support.snapshot_files import flip, stored
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
STEPS = SnapshotEvery(steps=5)


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


def unhurried(address: str) -> Callable[[Job], None]:
    """Wait for each snapshot of STEPS: one is taken at a time, and so small a training outruns
    them.
    """

    def wait(job: Job) -> None:
        if job.rank == 0 and job.version % 5 == 0:
            until(lambda: job.version in snapshots(address), f"a snapshot of version {job.version}")

    return wait


def interrupted(make: Make, shards: int, data_dir: Path, version: int) -> None:
    """Train up to a version, then kill the servers."""
    cluster = make(shards, min_workers=2, data_dir=data_dir, snapshot_every=STEPS)
    train(cluster.address, stop_at=version, each=unhurried(cluster.address))
    cluster.close()


# ---- schedule ------------------------------------------------------------------------------------


def test_a_snapshot_is_taken_at_each_step_interval(cluster: Make, tmp_path: Path) -> None:
    servers = cluster(2, min_workers=2, data_dir=tmp_path, snapshot_every=STEPS)

    train(servers.address, each=unhurried(servers.address))

    assert snapshots(servers.address) == [5, 10, 15]
    assert SnapshotDirectory(tmp_path).verify(10) == []


def test_a_snapshot_is_taken_by_time_while_there_are_updates(cluster: Make, tmp_path: Path) -> None:
    servers = cluster(2, data_dir=tmp_path, snapshot_every=SnapshotEvery(seconds=0.3))
    began = time.monotonic()

    with counter(servers.address) as client:

        def trained_and_seen() -> bool:
            count(client)
            return len(snapshots(servers.address)) >= 2

        until(trained_and_seen, "two snapshots")
    assert time.monotonic() - began >= 2 * 0.3
    first, second = snapshots(servers.address)[:2]
    assert 0 < first < second


def test_training_continues_during_a_snapshot(
    cluster: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, slow = threading.Event(), AtomicFiles.save

    def save(self: AtomicFiles, *args: Any) -> str:
        assert go_on.wait(30)
        return slow(self, *args)

    monkeypatch.setattr(AtomicFiles, "save", save)
    servers = cluster(2, data_dir=tmp_path, snapshot_every=STEPS)
    with counter(servers.address) as client:
        count(client, 12)
        assert snapshots(servers.address) == []

        go_on.set()
        until(lambda: 5 in snapshots(servers.address), "the snapshot that was being written")

    # the snapshot has the version of its cut, although training continued
    assert counted(stored(tmp_path, 5)) == 5


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux knows a priority of one thread")
def test_the_thread_that_writes_a_snapshot_yields_to_others(
    cluster: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, seen = AtomicFiles.save, []

    def save(self: AtomicFiles, *args: Any) -> str:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return usual(self, *args)

    monkeypatch.setattr(AtomicFiles, "save", save)
    servers = cluster(1, data_dir=tmp_path, snapshot_every=STEPS)
    with counter(servers.address) as client:
        count(client, 5)
        until(lambda: 5 in snapshots(servers.address), "a snapshot")

    assert seen[0] == os.getpriority(os.PRIO_PROCESS, 0) + WRITER_NICENESS


def test_a_shard_without_a_folder_is_named_and_its_part_is_not_awaited(
    cluster: Make, tmp_path: Path
) -> None:
    """For example one that took over while its predecessor still held the folder."""
    servers = cluster(0)
    servers.add(0, 2, data_dir=tmp_path, snapshot_every=SnapshotEvery(steps=2))
    servers.add(1, 2)
    with counter(servers.address) as client:
        for _ in range(2):
            count(client, 2)
            until(
                lambda: (
                    "shard 1: it has no --data-dir" in status(servers.address)["snapshot_problem"]
                ),
                "the problem",
            )
            servers.servers[0].snapshots.problem = ""
        count(client)

    assert snapshots(servers.address) == []


def test_only_the_newest_snapshots_stay_on_every_shard(cluster: Make, tmp_path: Path) -> None:
    servers = cluster(3, data_dir=tmp_path, snapshot_every=SnapshotEvery(steps=1), snapshot_keep=2)
    with counter(servers.address) as client:
        for version in range(1, 6):
            count(client)
            until(
                lambda version=version: version in snapshots(servers.address), f"snapshot {version}"
            )

    def folders() -> list[str]:
        return sorted(path.name for path in (tmp_path / "snapshots").iterdir())

    # the manifest is removed before the folder, so removed snapshots are not listed
    until(lambda: folders() == ["000000000004", "000000000005"], "the older ones gone")
    assert snapshots(servers.address) == [4, 5]


def test_a_snapshot_is_taken_when_the_last_worker_has_finished(
    cluster: Make, tmp_path: Path
) -> None:
    """No worker would repeat what is lost from then on."""
    servers = cluster(2, data_dir=tmp_path)
    with counter(servers.address, rank=0) as client:
        with counter(servers.address, rank=1):
            pass
        count(client, 3)
        assert snapshots(servers.address) == []
    until(lambda: snapshots(servers.address) == [3], "the snapshot of the end")


def test_stopping_takes_a_last_snapshot(cluster: Make, tmp_path: Path) -> None:
    servers = cluster(2, data_dir=tmp_path)
    with counter(servers.address) as client:
        count(client, 3)

    servers.stop()

    assert SnapshotDirectory(tmp_path).versions() == [3]
    assert counted(stored(tmp_path, 3)) == 3


# ---- content -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "staleness"), [("sync", None), ("async", None), ("ssp", 1)])
def test_all_shards_have_one_version_under_every_policy(
    cluster: Make, tmp_path: Path, policy: str, staleness: int | None
) -> None:
    every = SnapshotEvery(steps=3)
    servers = cluster(
        3,
        data_dir=tmp_path,
        policy=policy,
        staleness=staleness,
        min_workers=3,
        snapshot_every=every,
        snapshot_keep=100,
    )

    def work(rank: int) -> None:
        with counter(servers.address, rank) as client:
            count(client, 4)
            if rank == 0:  # ensures a snapshot during the training
                until(lambda: snapshots(servers.address), "a snapshot")
            count(client, 8)

    together(*[lambda rank=rank: work(rank) for rank in range(3)])
    servers.stop()

    versions = SnapshotDirectory(tmp_path).versions()
    assert len(versions) >= 2
    assert versions[-1] == (12 if policy == "sync" else 36)
    assert [counted(stored(tmp_path, version)) for version in versions] == versions


def test_a_snapshot_contains_what_resuming_needs(cluster: Make, tmp_path: Path) -> None:
    servers = cluster(2, min_workers=2, data_dir=tmp_path, snapshot_every=STEPS)
    train(servers.address, stop_at=7, each=unhurried(servers.address))

    found = SnapshotDirectory(tmp_path)
    manifest = found.manifest(5)
    reader = SnapshotReader(found, manifest)

    assert (manifest.job, manifest.version, manifest.shards) == (
        status(servers.address)["job"],
        5,
        2,
    )
    assert reader.kinds() == {"weight", "exp_avg", "exp_avg_sq"}
    assert set(reader.steps().values()) == {5}
    (group,) = json.loads(reader.groups_json())
    assert group["lr"] == pytest.approx(0.05 * 0.9**4)  # learning rate of the fifth step
    (loop,) = manifest.coordinator["loops"]
    assert loop["below"] == 10  # batches: 5 rounds of two workers
    assert sorted(manifest.coordinator["pushes"].values()) == [5, 5]
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or not path.read_bytes().startswith(b"\x80"), (
            f"{path} looks like a pickle"
        )


# ---- resume --------------------------------------------------------------------------------------


def test_a_resumed_training_ends_with_the_same_weights(
    cluster: Make, tmp_path: Path, uninterrupted_weights: str
) -> None:
    interrupted(cluster, 2, tmp_path, version=7)  # two versions after the snapshot

    again = cluster(2, min_workers=2, data_dir=tmp_path)

    assert status(again.address)["version"] == 5
    with finished(again) as address:
        assert digest(address) == uninterrupted_weights
        (loop,) = status(address)["data"]
        assert (loop["committed"], loop["total"]) == (30, 30)


def test_changing_from_two_to_three_to_one_server_changes_no_bit(
    cluster: Make, tmp_path: Path, uninterrupted_weights: str
) -> None:
    interrupted(cluster, 2, tmp_path, version=6)
    three = cluster(3, min_workers=2, data_dir=tmp_path, snapshot_every=STEPS)
    train(three.address, stop_at=11, each=unhurried(three.address))
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


def test_pushes_from_before_a_restart_do_not_count_again(cluster: Make, tmp_path: Path) -> None:
    """A worker that slept through the restart gets an error, and may rejoin."""
    first = cluster(1, data_dir=tmp_path)
    sleeper = counter(first.address, connect_timeout=1.0)
    count(sleeper, 4)
    first.stop()
    again = cluster(1, data_dir=tmp_path, bind=sleeper.addresses[0])

    with pytest.raises(Exception, match="is no longer a member of the job"), sleeper:
        sleeper.push({name: np.ones_like(array) for name, array in sleeper.weights.items()})

    assert counted(weights_of(again.address)) == 4
    with counter(again.address) as client:
        count(client)
        assert counted(client.pull()) == 5


def test_a_lost_shard_rolls_all_back_to_the_newest_snapshot(
    cluster: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    servers = cluster(2, data_dir=tmp_path, snapshot_every=STEPS)
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
    interrupted(cluster, 2, tmp_path, version=12)
    (part,) = SnapshotDirectory(tmp_path).path(10).glob("shard-1-*")
    flip(part)

    again = cluster(2, min_workers=2, data_dir=tmp_path)

    assert status(again.address)["version"] == 5
    (skipped,) = records_of(caplog, "snapshot_damaged")
    assert str(part) in skipped.__dict__["problem"]
    with finished(again) as address:
        assert digest(address) == uninterrupted_weights


def test_with_only_damaged_snapshots_the_job_does_not_start(cluster: Make, tmp_path: Path) -> None:
    interrupted(cluster, 1, tmp_path, version=11)
    for part in SnapshotDirectory(tmp_path).folder.glob("*/shard-*"):
        flip(part)

    with pytest.raises(SnapshotError, match=r"none of the snapshots in .* is valid") as caught:
        cluster(1, data_dir=tmp_path)

    assert caught.value.exit_code == 12
    assert SnapshotDirectory(tmp_path).versions() == [5, 10]  # no snapshot was removed


def test_resume_never_starts_afresh_and_moves_old_snapshots_aside(
    cluster: Make, tmp_path: Path
) -> None:
    interrupted(cluster, 1, tmp_path, version=6)

    again = cluster(1, data_dir=tmp_path, resume="never")

    assert status(again.address)["version"] == 0
    assert status(again.address)["state"] == "waiting for a model"
    assert [path.name for path in SnapshotDirectory(tmp_path).folder.iterdir()] == [
        "000000000005.aside-1"
    ]


def test_resume_with_a_version_starts_there(
    cluster: Make, tmp_path: Path, uninterrupted_weights: str
) -> None:
    interrupted(cluster, 2, tmp_path, version=12)

    again = cluster(2, min_workers=2, data_dir=tmp_path, resume=5)

    assert status(again.address)["version"] == 5
    assert SnapshotDirectory(tmp_path).versions() == [5]
    with finished(again) as address:
        assert digest(address) == uninterrupted_weights


def test_a_missing_version_is_refused(cluster: Make, tmp_path: Path) -> None:
    interrupted(cluster, 1, tmp_path, version=6)

    with pytest.raises(SnapshotError, match=r"no snapshot of version 4 .*\[5\]") as caught:
        cluster(1, data_dir=tmp_path, resume=4)

    assert (caught.value.exit_code, caught.value.reason) == (12, "NO_SNAPSHOT")
