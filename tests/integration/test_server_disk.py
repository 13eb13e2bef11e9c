"""Servers whose disk fails briefly or for long: training continues, and restarts are correct.
Operations are sampled over gRPC; test_every_operation covers each one.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import psserver.core.commands.recorder
from pscommon.settings.values import SnapshotEvery
from pscommon.snapshot import SnapshotDirectory
from pscommon.snapshot.atomic_files import AtomicFiles
from psserver.coordinator.snapshot_jobs import LAST_SNAPSHOT_ATTEMPTS
from psworker import Client
from psworker.ctl.cli import main
from tests.support.cluster import Cluster
from tests.support.disk_operations import TROUBLES, Operations, failing
from tests.support.events import events, records_of
from tests.support.metrics_scrape import Metrics
from tests.support.small_disk import SmallDisk, missing
from tests.support.snapshot_files import stored
from tests.support.workers import DEADLINE, count, counted, counter, until

Make = Callable[..., Cluster]

PUSHES = 5
FOR_GOOD = 1 << 30
STEPS = SnapshotEvery(steps=2)
RARELY = SnapshotEvery(seconds=3600)
ANY = "127.0.0.1:0"
LASTING = {"durability": "log", "log_fsync": "always", "metrics_bind": ANY}
BROKEN, MENDED = "log_unwritable", "log_writable_again"

# Sampled operations of `job`, different ones for each kind of failure. There are about 240 with a
# log and 50 without. The first ones are left out: without a generation file no server starts, and
# before that the job key is stored.
LOGGED = {trouble: range(16 + 24 * start, 230, 96) for start, trouble in enumerate(TROUBLES)}
SNAPSHOT_ONLY = {trouble: [13 + 12 * start] for start, trouble in enumerate(TROUBLES)}


def job(servers: Cluster) -> None:
    """Push five times, with a snapshot after every second push."""
    server_snapshots = servers.servers[0].snapshots
    with counter(servers.address) as client:
        for version in range(1, PUSHES + 1):
            count(client)
            if version % 2 == 0:
                until(
                    lambda version=version: (
                        server_snapshots.newest_version == version or server_snapshots.problem
                    ),
                    "a snapshot's end",
                )
        assert counted(client.pull()) == PUSHES


def started_again(make: Make, data_dir: Path, durability: str) -> int:
    """Return the version from which all servers resume, after training on."""
    again = make(2, data_dir=data_dir, durability=durability)
    directory = again.servers[0].service.directory  # type: ignore[union-attr]
    until(lambda: not directory.missing, "servers that go on together")
    with counter(again.address) as client:
        version = counted(client.pull())
        assert [server.engine.live.version for server in again.servers] == [version] * 2
        count(client)
        assert counted(client.pull()) == version + 1
    again.close()
    return version


def failures(servers: Cluster) -> float:
    """Return how many operations have failed, as dashboards show it."""
    scrapes = [Metrics(server.monitor.address) for server in servers.servers]
    return sum(
        scrape("ps_log_failures_total") + scrape("ps_snapshot_failures_total") for scrape in scrapes
    )


# ---- one operation fails -------------------------------------------------------------------------


def walk(make: Make, data_dir: Path, durability: str, number: int, trouble: str) -> None:
    """Run a job whose n-th disk operation fails; check what is left."""
    disk = Operations(number, number, TROUBLES[trouble])
    with pytest.MonkeyPatch.context() as patch:
        disk.install(patch.setattr)
        servers = make(
            2, data_dir=data_dir, snapshot_every=STEPS, **LASTING | {"durability": durability}
        )
        job(servers)
        failed = failures(servers)
        servers.close()
    assert len(disk.seen) >= number, "the job has fewer operations than this"
    manifest, skipped = SnapshotDirectory(data_dir).newest_valid()
    newest = manifest.version if manifest else 0
    assert skipped == ()
    if manifest:
        assert counted(stored(data_dir, newest)) == newest
    version = started_again(make, data_dir, durability)
    assert newest <= version <= PUSHES
    assert failed or version == PUSHES or durability == "snapshot"


@pytest.mark.every(4)
@pytest.mark.parametrize("trouble", TROUBLES)
def test_one_failed_operation_with_a_log_loses_nothing(
    cluster: Make, tmp_path: Path, trouble: str
) -> None:
    for number in LOGGED[trouble]:
        walk(cluster, tmp_path / str(number), "log", number, trouble)


@pytest.mark.parametrize("trouble", TROUBLES)
def test_one_failed_operation_with_snapshots_alone_leaves_a_snapshot(
    cluster: Make, tmp_path: Path, trouble: str
) -> None:
    for number in SNAPSHOT_ONLY[trouble]:
        walk(cluster, tmp_path / str(number), "snapshot", number, trouble)


@pytest.mark.parametrize("snapshots", [0, 2])
def test_without_a_failure_nothing_is_lost(
    cluster: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, snapshots: int
) -> None:
    """Also before the first snapshot; and no failure is logged."""
    servers = cluster(
        2, data_dir=tmp_path, snapshot_every=STEPS if snapshots else RARELY, durability="log"
    )
    if snapshots:
        job(servers)
    else:
        with counter(servers.address) as client:
            count(client, PUSHES)
    servers.close()

    assert started_again(cluster, tmp_path, "log") == PUSHES
    assert events(caplog, logging.ERROR) == []


def test_a_failed_removal_does_not_undo_a_snapshot(cluster: Make, tmp_path: Path) -> None:
    old, really = SnapshotDirectory(tmp_path).path(2), AtomicFiles.remove
    refused = threading.Event()

    def remove(files: AtomicFiles, path: Path) -> None:
        if old in (path, path.parent):
            refused.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        really(files, path)

    servers = cluster(1, data_dir=tmp_path, snapshot_every=STEPS, snapshot_keep=1, metrics_bind=ANY)
    server_snapshots = servers.servers[0].snapshots
    with counter(servers.address) as client, pytest.MonkeyPatch.context() as patch:
        count(client, 2)
        until(lambda: server_snapshots.newest_version == 2, "a snapshot")
        patch.setattr(AtomicFiles, "remove", remove)
        count(client, 2)
        until(lambda: server_snapshots.newest_version == 4, "another one")
        assert refused.wait(DEADLINE)

    assert failures(servers) == 0
    assert SnapshotDirectory(tmp_path).versions() == [2, 4]


# ---- all fail for a while ------------------------------------------------------------------------


@pytest.fixture
def short_retry_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin broken logs again sooner."""
    monkeypatch.setattr(psserver.core.commands.recorder, "LOG_REPAIR_INTERVAL_SECONDS", 0.3)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    if reason := missing(tmp_path):
        pytest.skip(reason)
    with SmallDisk(tmp_path / "disk", 1 << 20) as disk:
        yield disk


def reported_folders(caplog: pytest.LogCaptureFixture, event: str) -> set[str]:
    """Return the folders of logs with a report."""
    return {record.__dict__["folder"] for record in records_of(caplog, event)}


def recovers(
    servers: Cluster, client: Client, caplog: pytest.LogCaptureFixture, folders: set[str]
) -> int:
    """Wait until every broken log is complete without a due snapshot; return the version after one
    more push.
    """
    until(lambda: reported_folders(caplog, MENDED) == folders, "logs that are whole again")
    until(lambda: servers.servers[0].snapshots.newest_version is not None, "a snapshot")
    count(client)
    return counted(client.pull())


@pytest.mark.usefixtures("short_retry_interval")
def test_a_long_disk_failure_is_reported_occasionally(
    cluster: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One ERROR for each log, for any number of pushes and retries; logs recover with the disk."""
    caplog.set_level(logging.INFO)
    with pytest.MonkeyPatch.context() as patch:
        disk = Operations(40, FOR_GOOD, failing(errno.ENOSPC))
        disk.install(patch.setattr)
        servers = cluster(2, data_dir=tmp_path, snapshot_every=RARELY, **LASTING)
        with counter(servers.address) as client:
            count(client, 30)
            until(lambda: failures(servers) >= 10, "tries that fail")
            errors = [r.__dict__["folder"] for r in records_of(caplog, BROKEN)]
            assert sorted(errors) == [
                str(tmp_path / name) for name in ("log-job", "log-shard-0", "log-shard-1")
            ]
            assert not reported_folders(caplog, MENDED)

            disk.heal()
            version = recovers(servers, client, caplog, set(errors))
        servers.close()
    assert started_again(cluster, tmp_path, "log") == version == 31


@pytest.mark.usefixtures("short_retry_interval")
def test_a_really_full_disk_delays_only_the_log(
    cluster: Make, small_disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    """Filled during training, and freed."""
    caplog.set_level(logging.INFO)
    servers = cluster(2, data_dir=small_disk.path, snapshot_every=RARELY, **LASTING)
    with counter(servers.address) as client:
        count(client, 5)
        small_disk.fill()
        count(client, 50)
        small_disk.fill()
        until(lambda: failures(servers) >= 5, "tries that fail")
        folders = reported_folders(caplog, BROKEN)
        assert folders

        small_disk.free()
        version = recovers(servers, client, caplog, folders)
    servers.close()
    assert started_again(cluster, small_disk.path, "log") == version == 56


def test_a_requested_snapshot_on_a_full_disk_fails_at_once(
    cluster: Make,
    small_disk: SmallDisk,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After one try: each copies and writes the whole model."""
    servers = cluster(1, data_dir=small_disk.path, snapshot_every=RARELY)
    with counter(servers.address) as client:
        count(client)
        small_disk.fill()

        assert main(["--ps", servers.address, "snapshot", "save"]) == 12
        assert "No space left" in capsys.readouterr().err
        assert len(records_of(caplog, "snapshot_failed")) == 1

        small_disk.free()
        assert main(["--ps", servers.address, "snapshot", "save"]) == 0


def test_the_last_snapshot_on_a_full_disk_is_retried_with_pauses(
    cluster: Make,
    small_disk: SmallDisk,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The stopping process may kill the server soon, and the disk may stay full."""
    monkeypatch.setattr("psserver.coordinator.snapshot_jobs.RETRY_PAUSE_SECONDS", 0.2)
    servers = cluster(1, data_dir=small_disk.path, snapshot_every=RARELY)
    server = servers.servers[0]
    with counter(servers.address) as client:
        count(client)
        small_disk.fill()
        began = time.monotonic()
        server.stop("SIGTERM")
        assert server.ended.wait(30)

    assert server.snapshots.failures == LAST_SNAPSHOT_ATTEMPTS
    assert time.monotonic() - began >= 0.2 * (LAST_SNAPSHOT_ATTEMPTS - 1)
    assert "version 1 is not saved, and there is no snapshot" in server.not_saved
    assert "No space left" in server.not_saved
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert not (small_disk.path / "snapshots").exists()
