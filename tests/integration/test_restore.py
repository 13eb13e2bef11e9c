"""ps-ctl snapshot restore: a running job rolls back to a snapshot on all shards and trains on."""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from pscommon.core.errors import FencedError
from pscommon.snapshot import SnapshotDirectory
from pscommon.snapshot.atomic_files import AtomicFiles
from psworker import Client, Job
from psworker.ctl.cli import main as ps_ctl
from psworker.ctl.job_client import CoordinatorClient
from tests.support.cluster import Cluster
from tests.support.ctl_output import ctl
from tests.support.data_training import ALL, EPOCHS, SIZE
from tests.support.data_training import train as train_loop
from tests.support.events import events
from tests.support.snapshot_files import flip, stored
from tests.support.training_threads import real
from tests.support.workers import (
    DEADLINE,
    ONES,
    count,
    counted,
    counter,
    snapshots,
    status,
    together,
    until,
    weights_of,
)

Make = Callable[..., Cluster]
Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _no_external_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PS_PS", "PS_SERVERS", "PS_OUTPUT", "PS_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)


def saved(address: str, client: Client, capsys: Output, *versions: int) -> None:
    """Train up to each of these versions and take a snapshot there."""
    for version in versions:
        count(client, version - status(address)["version"])
        assert ctl(capsys, "--ps", address, "snapshot", "save")["version"] == version


class PushingThread:
    """Pushes ones until it is stopped, and rejoins when fenced. acknowledged: pushes by worker
    number.
    """

    def __init__(self, address: str, rank: int) -> None:
        self.acknowledged: dict[int, int] = {}
        self._address, self._rank, self._end = address, rank, Event()

    def run(self) -> None:
        with counter(self._address, self._rank) as client:
            while not self._end.is_set():
                try:
                    self._push(client)
                except FencedError:
                    client.rejoin()

    def _push(self, client: Client) -> None:
        if client.push(ONES).status in ("applied", "duplicate"):
            self.acknowledged[client.worker] = self.acknowledged.get(client.worker, 0) + 1

    def end(self) -> None:
        self._end.set()


@contextmanager
def pushing(address: str, workers: int) -> Iterator[list[PushingThread]]:
    """Start some threads; afterwards they have ended."""
    pushers = [PushingThread(address, rank) for rank in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(pusher.run) for pusher in pushers]
        try:
            yield pushers
        finally:
            for pusher in pushers:
                pusher.end()
    assert [run.result(DEADLINE) for run in running] == [None] * workers


# ---- rollback ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_all_shards_roll_back_under_load_and_no_later_update_is_lost(
    cluster: Make, capsys: Output, caplog: pytest.LogCaptureFixture, tmp_path: Path, policy: str
) -> None:
    caplog.set_level(logging.WARNING, "psserver")
    servers = cluster(3, policy=policy, data_dir=tmp_path)
    address = servers.address
    with counter(address, rank=9) as client:
        saved(address, client, capsys, 5)
    with pushing(address, 2) as pushers:
        until(lambda: status(address)["version"] >= 15, "some training")
        found = ctl(capsys, "--ps", address, "snapshot", "restore", 5)
        until(lambda: sum(n >= 5 for n in fresh(address).values()) == 2, "both at work again")

    assert (found["version"], found["state"]) == (5, "restored")
    assert "rollback_requested" in events(caplog)
    assert fresh(address) == {
        w: n for each in pushers for w, n in each.acknowledged.items() if w in fresh(address)
    }
    steps = sum(fresh(address).values())
    assert status(address)["steps"] - 5 == steps
    version = counted(weights_of(address))  # the same on all shards
    assert version == status(address)["version"]
    assert (
        version - 5 == steps if policy == "async" else version - 5 >= max(fresh(address).values())
    )


def fresh(address: str) -> dict[int, int]:
    """Return the steps of the workers that joined after the rollback, by worker."""
    return {
        r["worker"]: r["steps"]
        for r in status(address)["workers"]
        if r["reason"] != "the job was restarted"
    }


def test_a_waiting_push_learns_of_the_rollback_at_once(
    cluster: Make, capsys: Output, tmp_path: Path
) -> None:
    """Its call would have ended by itself after five seconds."""
    address = cluster(2, min_workers=2, data_dir=tmp_path).address
    patient = {"connect_timeout": 60.0}
    with (
        ThreadPoolExecutor(1) as pool,
        counter(address, 0, **patient) as one,
        counter(address, 1) as other,
    ):
        together(lambda: count(one), lambda: count(other))
        ctl(capsys, "--ps", address, "snapshot", "save")
        push = pool.submit(one.push, ONES)
        until(
            lambda: f"worker {other.worker} " in status(address)["waiting_for"], "a push that waits"
        )

        ctl(capsys, "--ps", address, "snapshot", "restore", 1)

        with pytest.raises(FencedError):
            push.result(3.0)


def test_scripts_continue_with_the_data_of_that_version(
    cluster: Make, capsys: Output, tmp_path: Path
) -> None:
    """Sync: both are awaited again, so that the job makes the same updates."""
    address = cluster(2, min_workers=2, data_dir=tmp_path).address

    def each(job: Job, step: int) -> None:
        if job.rank == 0 and step == 2:
            assert ctl(capsys, "--ps", address, "snapshot", "save")["version"] == 2
        if job.rank == 0 and step == 5:
            ctl(capsys, "--ps", address, "snapshot", "restore", 2)
            assert (status(address)["version"], status(address)["samples"]) == (2, 4 * 4)

    real(address, 2, lambda job: train_loop(job, lambda step: each(job, step)))

    (row,) = status(address)["data"]
    assert (row["committed"], row["leased"], row["dropped"], row["ended"]) == (len(ALL), 0, 0, True)
    assert (status(address)["samples"], status(address)["version"]) == (
        EPOCHS * SIZE,
        (len(ALL) + 1) // 2,
    )


def test_the_current_policy_does_not_change(cluster: Make, capsys: Output, tmp_path: Path) -> None:
    address = cluster(1, min_workers=2, data_dir=tmp_path).address
    with counter(address, 0) as one, counter(address, 1) as other:
        together(lambda: count(one), lambda: count(other))
        ctl(capsys, "--ps", address, "snapshot", "save")
        ctl(capsys, "--ps", address, "policy", "set", "async")
        ctl(capsys, "--ps", address, "snapshot", "restore", 1)

        assert (status(address)["policy"], status(address)["version"]) == ("async", 1)
        for client in (one, other):
            client.rejoin()
        count(one, 3)


def test_workers_that_have_left_since_are_not_awaited(
    cluster: Make, capsys: Output, tmp_path: Path
) -> None:
    address = cluster(1, min_workers=3, data_dir=tmp_path).address
    with counter(address, 0) as one, counter(address, 1) as two:
        with counter(address, 2) as three:
            together(*[lambda each=each: count(each) for each in (one, two, three)])
            ctl(capsys, "--ps", address, "snapshot", "save")
        ctl(capsys, "--ps", address, "snapshot", "restore", 1)
        assert status(address)["min_workers"] == 2

        for client in (one, two):
            client.rejoin()
        together(lambda: count(one, 2), lambda: count(two, 2))
        assert counted(one.pull()) == 3


def test_newer_snapshots_are_moved_aside_and_the_log_starts_there(
    cluster: Make, capsys: Output, tmp_path: Path
) -> None:
    """With --durability log: later training survives a crash of all servers."""
    settings = {"data_dir": tmp_path, "durability": "log"}
    servers = cluster(2, **settings)
    with counter(servers.address) as client:
        saved(servers.address, client, capsys, 2, 4, 6)
        ctl(capsys, "--ps", servers.address, "snapshot", "restore", 4)
        assert snapshots(servers.address) == [2, 4] == servers.servers[0].snapshots.retained
        assert sorted(
            path.name for path in SnapshotDirectory(tmp_path).folder.glob("*6.aside-*")
        ) == ["000000000006.aside-1"]
        client.rejoin()
        count(client, 3)
    servers.close()

    again = cluster(2, **settings)

    until(lambda: status(again.address)["state"] != "waiting for servers", "both servers")
    with counter(again.address) as client:
        assert counted(client.pull()) == 7
        count(client)


@pytest.mark.full
def test_a_snapshot_in_progress_is_abandoned(
    cluster: Make, capsys: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one of that version consists of its own parts."""
    address = cluster(2, data_dir=tmp_path).address
    written, go_on, save = Event(), Event(), AtomicFiles.save

    def slow(self: AtomicFiles, *args: Any) -> str:
        written.set()
        assert go_on.wait(30)
        return save(self, *args)

    with (
        ThreadPoolExecutor(2) as pool,
        counter(address) as client,
        CoordinatorClient([address], DEADLINE) as servers,
    ):
        saved(address, client, capsys, 1)
        count(client, 2)
        monkeypatch.setattr(AtomicFiles, "save", slow)
        saving = pool.submit(servers.save, DEADLINE)
        assert written.wait(30)
        going = pool.submit(servers.restore, 1, DEADLINE)
        # otherwise its parts could mix with those of the next snapshot
        with pytest.raises(TimeoutError):
            going.result(2.0)
        go_on.set()
        assert going.result(DEADLINE) is None
        assert snapshots(address) == [1]

        assert saving.result(DEADLINE)[0] == 1, "that is what stands now"
        client.rejoin()
        saved(address, client, capsys, 3)
    assert (snapshots(address), SnapshotDirectory(tmp_path).verify(3)) == ([1, 3], [])
    assert counted(stored(tmp_path, 3)) == 3


# ---- refusals ------------------------------------------------------------------------------------


def test_a_missing_or_damaged_version_is_refused_and_the_job_continues(
    cluster: Make, capsys: Output, tmp_path: Path
) -> None:
    address = cluster(2, data_dir=tmp_path).address
    with counter(address) as client:
        saved(address, client, capsys, 1, 2)
        (part,) = SnapshotDirectory(tmp_path).path(1).glob("shard-1-*")
        flip(part)

        assert ps_ctl(["--ps", address, "snapshot", "restore", "7"]) == 12
        assert "NO_SNAPSHOT: " in (text := capsys.readouterr().err)
        assert "version 7 " in text
        assert "[1, 2]" in text
        assert ps_ctl(["--ps", address, "snapshot", "restore", "1"]) == 12
        assert part.name in capsys.readouterr().err
        count(client)

    assert (snapshots(address), counted(weights_of(address))) == ([1, 2], 3)


def test_newer_snapshots_stay_when_the_rollback_fails(
    cluster: Make, capsys: Output, tmp_path: Path
) -> None:
    address = cluster(1, data_dir=tmp_path).address
    with counter(address) as client:
        saved(address, client, capsys, 1, 2)
        (tmp_path / "generation").unlink()
        (tmp_path / "generation").mkdir()  # the generation of a new start cannot be stored

        assert ps_ctl(["--ps", address, "snapshot", "restore", "1"]) == 12
        assert "cannot count this start of the job" in capsys.readouterr().err
        count(client)

    assert (
        snapshots(address),
        SnapshotDirectory(tmp_path).versions(),
        counted(weights_of(address)),
    ) == ([1, 2], [1, 2], 3)


def test_without_a_data_directory_restore_is_refused(cluster: Make, capsys: Output) -> None:
    address = cluster(1).address
    with counter(address) as client:
        assert ps_ctl(["--ps", address, "snapshot", "restore", "1"]) == 12
        assert "NO_SNAPSHOT: " in (text := capsys.readouterr().err)
        assert "--data-dir" in text
        count(client)


def test_an_absent_shard_is_named_and_rolls_back_when_it_returns(
    cluster: Make, capsys: Output, tmp_path: Path
) -> None:
    servers = cluster(2, data_dir=tmp_path)
    with counter(servers.address) as client:
        saved(servers.address, client, capsys, 2)
        count(client)
    away = servers.servers.pop()
    away.close()
    until(
        lambda: ctl(capsys, "--ps", servers.address, "status")["state"] == "waiting for servers",
        "one that is away",
    )

    assert ps_ctl(["--ps", servers.address, "snapshot", "restore", "2", "--wait", "200ms"]) == 20
    assert "shard 1 of 2 to connect" in capsys.readouterr().err

    servers.add(1, 2, data_dir=tmp_path, bind=away.address)
    with counter(servers.address) as client:
        assert counted(client.pull()) == 2


def test_an_ending_job_does_not_roll_back(cluster: Make, capsys: Output, tmp_path: Path) -> None:
    servers = cluster(1, data_dir=tmp_path)
    with counter(servers.address) as client:
        saved(servers.address, client, capsys, 1)
        ctl(capsys, "--ps", servers.address, "stop", "--reason", "enough")

        assert ps_ctl(["--ps", servers.address, "snapshot", "restore", "1"]) == 20
        assert "shard 0 is stopping: enough" in capsys.readouterr().err
