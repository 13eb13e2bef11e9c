"""Snapshots of running jobs: when they are taken and what they contain."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pscommon.settings.values import SnapshotEvery
from pscommon.snapshot import SnapshotDirectory, SnapshotReader
from pscommon.snapshot.atomic_files import AtomicFiles
from psserver.durability.snapshots import WRITER_NICENESS
from tests.support.cluster import Cluster
from tests.support.snapshot_files import stored
from tests.support.snapshot_schedule import EVERY_5_STEPS, wait_for_snapshots
from tests.support.workers import (
    count,
    counted,
    counter,
    snapshots,
    status,
    together,
    train,
    until,
)

Make = Callable[..., Cluster]


# ---- schedule ------------------------------------------------------------------------------------


def test_a_snapshot_is_taken_at_each_step_interval(cluster: Make, tmp_path: Path) -> None:
    servers = cluster(2, min_workers=2, data_dir=tmp_path, snapshot_every=EVERY_5_STEPS)

    train(servers.address, each=wait_for_snapshots(servers.address))

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
    servers = cluster(2, data_dir=tmp_path, snapshot_every=EVERY_5_STEPS)
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
    servers = cluster(1, data_dir=tmp_path, snapshot_every=EVERY_5_STEPS)
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
    servers = cluster(2, min_workers=2, data_dir=tmp_path, snapshot_every=EVERY_5_STEPS)
    train(servers.address, stop_at=7, each=wait_for_snapshots(servers.address))

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
