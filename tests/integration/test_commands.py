"""ps-ctl against running servers, and ps-server from its start to its several ends."""

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pscommon.core.errors import NonFiniteError, UnreachableError
from pscommon.snapshot import SnapshotDirectory
from psworker.ctl.cli import main as ps_ctl
from psworker.session.drain import Stopping
from tests.support.cluster import Cluster
from tests.support.ctl_output import Output, ctl
from tests.support.ports import free_port
from tests.support.programs import Programs, programs_in
from tests.support.snapshot_files import stored
from tests.support.workers import (
    ONES,
    VERSIONS,
    count,
    counted,
    counter,
    status,
    together,
    train,
    training,
    until,
)

Make = Callable[..., Cluster]


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as programs:
        yield programs


@pytest.fixture(autouse=True)
def _no_external_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PS_PS", "PS_SERVERS", "PS_OUTPUT", "PS_TIMEOUT", "PS_CONFIG", "PS_LEASE"):
        monkeypatch.delenv(name, raising=False)


# ---- ps-ctl --------------------------------------------------------------------------------------


def test_status_shows_a_job_from_its_start_to_its_end(cluster: Make, capsys: Output) -> None:
    servers = cluster(2, min_workers=2, job="otter")
    until(
        lambda: ctl(capsys, "--ps", servers.address, "status")["state"] == "waiting for a model",
        "both servers",
    )
    assert ctl(capsys, "--ps", servers.address, "status")["model"] is None
    train(servers.address)

    for server in servers.servers:  # any server leads to the job
        found = ctl(capsys, "--ps", server.address, "status")
        assert (found["job"], found["policy"], found["state"]) == ("otter", "sync", "running")
        assert (found["version"], found["steps"], found["samples"], found["finished"]) == (
            15,
            30,
            240,
            2,
        )
        assert found["pushes"] == {"applied": 30, "duplicate": 0, "stale": 0, "rejected": 0}
        assert (
            found["model"].items() >= {"tensors": 9, "parameters": 228, "optimizer": "adam"}.items()
        )
        assert [row["address"] for row in found["servers"]] == [
            each.address for each in servers.servers
        ]
        assert [(row["committed"], row["total"], row["epoch"]) for row in found["data"]] == [
            (30, 30, 3)
        ]


def test_workers_lists_the_workers(cluster: Make, capsys: Output) -> None:
    address = cluster(1).address
    with counter(address, rank=3, device="cpu") as client:
        count(client, 2)
        (row,) = ctl(capsys, "--ps", address, "workers")

    wanted = {
        "worker": client.worker,
        "rank": 3,
        "state": "active",
        "steps": 2,
        "clock": 2,
        "device": "cpu",
    }
    assert row.items() >= wanted.items()


def test_plan_shows_the_partition(cluster: Make, capsys: Output) -> None:
    servers = cluster(2)
    with counter(servers.address) as client:
        found = ctl(capsys, "--ps", servers.address, "plan")

        assert found["plan_digest"] == client.plan.digest
    assert [row["address"] for row in found["shards"]] == [each.address for each in servers.servers]
    assert sum(row["bytes"] for row in found["shards"]) == found["bytes"]
    assert {row["name"]: row["shape"] for row in found["tensors"]} == {"a": [3, 40], "b": [100]}
    assert {shard for row in found["tensors"] for shard in row["shards"]} == {0, 1}


def test_plan_before_registration_has_no_model(cluster: Make, capsys: Output) -> None:
    assert ps_ctl(["--ps", cluster(1).address, "plan"]) == 20

    assert (
        "the model is not registered yet: the job waits for a worker to register a model"
        in capsys.readouterr().err
    )


def test_config_shows_the_settings_of_a_server_and_their_sources(
    capsys: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.toml").write_text('policy = "async"\nlease = "9s"\n')
    monkeypatch.setenv("PS_LEASE", "7s")
    flags = ("--config", tmp_path / "job.toml", "--shard", "1/2")

    found = {row["key"]: (row["value"], row["source"]) for row in ctl(capsys, "config", *flags)}

    assert found["shard"] == ("1/2", "flag")
    assert found["lease"] == (7.0, "environment")
    assert found["policy"] == ("async", "file")
    assert found["snapshot_keep"] == (3, "default")


def test_doctor_accepts_this_machine(capsys: Output, tmp_path: Path) -> None:
    found = ctl(capsys, "doctor", "--port", free_port(), "--data-dir", tmp_path)

    checked = {row["check"].split()[0] for row in found}
    assert checked >= {
        "python",
        "packages",
        "torch",
        "devices",
        "cores",
        "memory",
        "port",
        "folder",
        "loopback",
    }
    assert all(row["state"] in ("ok", "warning") for row in found)


def test_explain_describes_an_exit_code(capsys: Output) -> None:
    assert "NO_SNAPSHOT" in ctl(capsys, "explain", 12)["reasons"]
    assert ctl(capsys, "explain", "NON_FINITE")["exit_code"] == 14


def test_stop_ends_every_server_with_a_last_snapshot(
    cluster: Make, capsys: Output, tmp_path: Path
) -> None:
    servers = cluster(2, data_dir=tmp_path)
    with counter(servers.address) as client:
        count(client, 3)

        assert (
            ctl(capsys, "--ps", servers.servers[1].address, "stop", "--reason", "accurate enough")[
                "state"
            ]
            == "stopping"
        )

        assert all(server.ended.wait(30) for server in servers.servers)
        assert [server.failure for server in servers.servers] == [None, None]
    assert SnapshotDirectory(tmp_path).versions() == [3]


def test_workers_end_their_steps_before_the_last_snapshot(
    cluster: Make, capsys: Output, tmp_path: Path
) -> None:
    """It contains every acknowledged push, and no worker searches for the servers afterwards."""
    servers, pushed = cluster(2, min_workers=2, data_dir=tmp_path), []

    def work(rank: int) -> None:
        with counter(servers.address, rank) as client:
            while not client.stopping:
                pushed.append(client.push(ONES).version)

    def stop() -> None:
        until(lambda: len(pushed) > 10, "training")
        ctl(capsys, "--ps", servers.address, "stop")

    together(lambda: work(0), lambda: work(1), stop)

    assert all(server.ended.wait(30) for server in servers.servers)
    assert SnapshotDirectory(tmp_path).versions() == [max(pushed)]
    assert [server.failure for server in servers.servers] == [None, None]


def test_a_stopping_server_is_awaited_by_its_workers(cluster: Make, tmp_path: Path) -> None:
    """After a signal, for example to move it to another host: the job has not ended."""
    settings = {"data_dir": tmp_path, "durability": "log", "lease": 0.5}
    servers = cluster(2, **settings)
    first, second = servers.servers
    with counter(servers.address) as client:
        count(client, 3)
        assert first.service is not None
        take, taken = first.service.snapshot_scheduler.last, threading.Event()
        # longer than the interval of heartbeats
        first.service.snapshot_scheduler.last = lambda: (
            taken.wait(0.5),
            take(),
        )
        first.stop("SIGTERM")
        assert first.ended.wait(30)
        first.close()
        assert SnapshotDirectory(tmp_path).versions() == [3]
        assert not client.stopping

        servers.add(0, 2, bind=first.address, **settings)
        count(client)
        assert counted(client.pull()) == 4
        assert not second.ended.is_set()


@pytest.mark.full
def test_a_worker_waiting_for_data_gets_it_after_the_server_restarts(
    cluster: Make, tmp_path: Path
) -> None:
    """Its loop has not ended: otherwise the others would continue alone, or nothing would be
    trained.
    """
    settings = {"data_dir": tmp_path, "durability": "log", "min_workers": 2, "lease": 5.0}
    servers = cluster(1, **settings)
    (first,) = servers.servers

    def comes_later() -> int:
        until(
            lambda: [row["phase"] for row in status(first.address)["workers"]] == ["idle"],
            "a wait for data",
        )
        first.stop("SIGTERM")
        assert first.ended.wait(30)
        first.close()
        servers.add(0, 1, bind=first.address, **settings)
        return training(first.address, 1)

    assert together(lambda: training(first.address, 0), comes_later) == [VERSIONS, VERSIONS]


def test_a_snapshot_request_while_the_servers_stop_is_refused(
    cluster: Make, tmp_path: Path
) -> None:
    servers = cluster(1, data_dir=tmp_path)
    service = servers.servers[0].service
    assert service is not None
    with counter(servers.address) as client:
        count(client)
        service.stop_reason = "asked to"
        with pytest.raises(UnreachableError) as caught:
            service.snapshot_scheduler.save(300.0)
        service.stop_reason = None
    assert caught.value.reason == "STOPPING"


def test_servers_that_stop_together_share_the_last_snapshot(cluster: Make, tmp_path: Path) -> None:
    """The first one takes it, the others write their parts; they end with it."""
    servers = cluster(2, data_dir=tmp_path)
    with counter(servers.address) as client:
        count(client, 3)
        for server in reversed(servers.servers):
            server.stop("SIGTERM")
        assert servers.servers[0].ended.wait(30)
        servers.servers[0].close()
        assert servers.servers[1].ended.wait(2)
    assert SnapshotDirectory(tmp_path).versions() == [3]


def test_all_workers_get_the_reason_why_their_job_failed(cluster: Make) -> None:
    address = cluster(2, min_workers=2, policy="async").address
    with counter(address, rank=0) as one, counter(address, rank=1) as other:
        assert (
            one.push({name: np.full_like(value, np.nan) for name, value in ONES.items()}).status
            == "rejected"
        )
        for client in (one, other):
            with pytest.raises(NonFiniteError, match=f"worker {one.worker} .rank 0, "):
                until(lambda client=client: count(client), "the reason")


def test_a_worker_learns_of_the_stop_and_ends_normally(cluster: Make, capsys: Output) -> None:
    """Its loop raises Stopping after the step in progress; its unused data go to other workers."""
    address, versions = cluster(1).address, []

    def stop_in_the_middle(job: Any) -> None:
        versions.append(job.version)
        if job.version == 4:
            ctl(capsys, "--ps", address, "stop")
            until(lambda: job.client.stopping, "the word that the job ends")

    with pytest.raises(Stopping, match="the job ends"):
        train(address, workers=1, each=stop_in_the_middle)

    assert versions == [1, 2, 3, 4]


# ---- ps-server and ps-worker ---------------------------------------------------------------------

SCRIPT = """
import numpy as np, psworker
with psworker.Client() as client:
    client.register({"w": np.zeros(100)}, psworker.OptimizerSpec("sgd", lr=1.0))
    for _ in range(3):
        client.push({"w": np.ones(100)})
"""


def listening_address(programs: Programs, name: str) -> str:
    """Return the address of the server that writes this port file."""
    path = programs.folder / name
    until(path.exists, "a port", seconds=60)
    return f"127.0.0.1:{path.read_text().strip()}"


def test_servers_without_join_are_introduced_by_a_worker(programs: Programs) -> None:
    """With --exit-when-done they end by themselves, with a last snapshot."""
    programs.script(SCRIPT)
    flags = ("--bind", "127.0.0.1:0", "--data-dir", "job", "--exit-when-done")
    servers = [
        programs.start("ps-server", "--shard", f"{shard}/2", "--port-file", f"{shard}.port", *flags)
        for shard in range(2)
    ]
    addresses = ",".join(listening_address(programs, f"{shard}.port") for shard in (1, 0))

    worker = programs.run("ps-worker", "--ps", addresses, "train.py")

    assert worker.wait() == 0, worker.output
    assert [server.wait() for server in servers] == [0, 0], servers[0].output + servers[1].output
    assert counted(stored(programs.folder / "job", 3)) == 3
    assert not list(programs.folder.glob("*.port"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_server_with_a_last_snapshot(
    programs: Programs, number: signal.Signals, code: int
) -> None:
    server = programs.start(
        "ps-server", "--bind", "127.0.0.1:0", "--port-file", "port", "--data-dir", "job"
    )
    with counter(listening_address(programs, "port")) as client:
        count(client, 5)
        assert status(client.addresses[0])["version"] == 5

        server.send_beside_main(number)

        assert server.wait() == code, server.output
    assert "Traceback" not in server.output
    assert counted(stored(programs.folder / "job", 5)) == 5
