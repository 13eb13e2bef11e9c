"""Wrong addresses, ports and scripts get a clear error and the right exit code."""

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pscommon.core.errors import (
    MismatchError,
    TakenError,
)
from psserver import cli as server_command
from psserver.process.config import ServerConfig
from psserver.server import Server
from tests.support.cluster import Cluster
from tests.support.programs import Programs, descendants, programs_in, wait_for_exit
from tests.support.refusals import refused
from tests.support.workers import (
    connected,
    count,
    counter,
    status,
    until,
)

Make = Callable[..., Cluster]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with programs_in(tmp_path_factory.mktemp("bad")) as programs:
        yield programs


# ---- servers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shard", "text"),
    [("2/2", "shards are counted from 0"), ("x", "is not I/N"), ("-1/2", "is not I/N")],
)
def test_a_wrong_shard_is_refused(
    shard: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert server_command.main(["--shard", shard]) == 2

    assert text in capsys.readouterr().err


def test_a_port_file_in_a_missing_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert server_command.main(["--port-file", str(tmp_path / "none" / "port")]) == 2

    assert "does not exist" in capsys.readouterr().err


def test_a_port_file_that_cannot_be_written_is_refused(tmp_path: Path, programs: Programs) -> None:
    """It is not removed at the end either."""
    path = tmp_path / ("port" * 100)
    server = programs.fork("ps-server", "--bind", "127.0.0.1:0", "--port-file", path)

    assert server.wait() == 2
    assert f"--port-file {path} cannot be written: File name too long" in server.err
    assert "Traceback" not in server.err


def test_two_servers_with_one_shard_are_refused(cluster: Make, programs: Programs) -> None:
    servers = cluster(2)
    until(lambda: status(servers.address)["state"] == "waiting for a model", "two servers")

    second = programs.fork(
        "ps-server", "--shard", "1/2", "--join", servers.address, "--bind", "127.0.0.1:0"
    )

    assert second.wait() == 11
    assert f"SHARD_TAKEN: shard 1 is already served by {servers.servers[1].address}" in second.err
    with counter(servers.address) as client:  # the first server continues
        count(client)


def test_a_shard_with_another_number_of_shards_is_refused(cluster: Make) -> None:
    servers = cluster(2)

    with closing(
        Server(ServerConfig(shard=1, shards=3, bind="127.0.0.1:0", join=servers.address))
    ) as stranger:
        stranger.start()

        assert stranger.ended.wait(30)
        with refused(
            MismatchError, 11, "SHARD_MISMATCH", "shard 1/3 does not belong to this job of 2 shards"
        ):
            raise stranger.failure or AssertionError("it did not fail")


def test_a_taken_port_is_refused(cluster: Make, programs: Programs) -> None:
    address = cluster(1).address

    second = programs.run("ps-server", "--bind", address)

    assert second.wait() == 10
    assert f"TAKEN: cannot listen on {address}" in second.err
    assert "Traceback" not in second.err
    with counter(address) as client:
        count(client)


def test_a_taken_metrics_port_is_refused(cluster: Make) -> None:
    taken = cluster(1, metrics_bind="127.0.0.1:0").servers[0].monitor.address

    with refused(TakenError, 10, "TAKEN", taken):
        cluster(1, metrics_bind=taken)


def test_a_data_directory_in_use_is_refused(cluster: Make, tmp_path: Path) -> None:
    address = cluster(1, data_dir=tmp_path).address

    with refused(TakenError, 10, "TAKEN", str(tmp_path), f"process {os.getpid()}"):
        cluster(1, data_dir=tmp_path)

    with counter(address) as client:
        count(client)


# ---- addresses -----------------------------------------------------------------------------------


def test_an_incomplete_set_of_addresses_is_refused() -> None:
    """Servers without --join do not know each other until a worker lists them all."""
    configs = [ServerConfig(shard=shard, shards=3, bind="127.0.0.1:0") for shard in range(2)]
    with closing(Server(configs[0])) as first, closing(Server(configs[1])) as second:
        first.start()
        second.start()

        with refused(MismatchError, 11, "SHARD_MISMATCH", "shard 2 of 3", first.address):
            connected(f"{first.address},{second.address}", connect_timeout=1.0)


def test_an_address_listed_twice_is_refused(cluster: Make, programs: Programs) -> None:
    address = cluster(1).address

    with refused(MismatchError, 11, "SHARD_MISMATCH", f"{address} is listed twice"):
        connected(f"{address},{address}")


def test_two_addresses_of_one_shard_are_refused(cluster: Make) -> None:
    one, other = cluster(1, job="otter").address, cluster(1, job="otter").address

    with refused(MismatchError, 11, "SHARD_MISMATCH", f"{one} and {other} are both shard 0 of 1"):
        connected(f"{one},{other}")


def test_servers_of_two_jobs_are_refused(cluster: Make) -> None:
    one, other = cluster(1, job="otter").address, cluster(1, job="stoat").address

    with refused(MismatchError, 11, "JOB_MISMATCH", "otter", "stoat"):
        connected(f"{one},{other}")


def test_unreachable_servers_are_reported(programs: Programs) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    programs.script("import psworker; psworker.connect()", "connect.py")

    began = time.monotonic()
    worker = programs.run("ps-worker", "--ps", address, "--connect-timeout", "1s", "connect.py")

    assert worker.wait() == 20
    # less than the default of 60 s; the start of the process takes most of it
    assert time.monotonic() - began < 30
    assert re.search(rf"UNREACHABLE: no answer within \d+ s from {address}", worker.err)
    assert "Traceback" not in worker.err


# ---- scripts -------------------------------------------------------------------------------------

BROKEN = """
import psworker
with psworker.connect() as job:
    if job.rank == 1:
        raise ValueError("the data is bad")
    import signal; signal.pause()
"""

DIVERGES = """
import torch, psworker
model = torch.nn.Linear(3, 1)
with psworker.connect() as job:
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(5):
        loss = model(torch.ones(2, 3)).sum() * (float("nan") if step == 3 else 1)
        loss.backward()
        optimizer.step()
        print("made step", step)
"""

PATIENT = """
import os, signal, psworker
with psworker.connect() as job:
    print("waits")
    signal.pause()
"""


def test_an_exception_of_a_script_exits_with_its_code(programs: Programs) -> None:
    programs.script(BROKEN)

    run = programs.run("ps-run", "--workers", 2, "--summary", "broken.json", "train.py")

    assert run.wait() == 1
    assert run.output.count("Traceback (most recent call last)") == 1
    assert run.output.count('raise ValueError("the data is bad")') == 1
    box = run.err[run.err.index("╭─ first failure: w1") :]
    assert "ValueError: the data is bad" in box
    assert "w1 exited with 1" in box
    found = json.loads((programs.folder / "broken.json").read_text())
    assert (found["status"], found["error"]["process"], found["error"]["exit_code"]) == (
        "failed",
        "w1",
        1,
    )


def test_a_script_with_a_non_finite_gradient_fails(programs: Programs) -> None:
    programs.script(DIVERGES)

    run = programs.run("ps-run", "train.py")

    assert run.wait() == 14
    assert "made step 2" in run.out
    assert "made step 3" not in run.out
    box = run.err[run.err.index("╭─ first failure: ") :]
    assert "worker 1 (rank 0, " in box
    assert "tensor " in box
    assert "remedy: lower the learning rate or clip" in box


def test_ctrl_c_leaves_nothing_behind(programs: Programs) -> None:
    before = set(programs.temporary.iterdir())
    programs.script(PATIENT)
    flags = ("--servers", 2, "--workers", 1, "--metrics-bind", "127.0.0.1:0")
    run = programs.start("ps-run", *flags, "--summary", "interrupted.json", "train.py")
    run.wait_for("waits")
    everybody = descendants(run.pid)
    assert len(everybody) == 3
    assert {run.pid, *everybody} <= set(programs.alive)

    run.send(signal.SIGINT)

    assert run.wait() == 130
    assert "Traceback" not in run.output
    assert all(map(wait_for_exit, everybody))
    assert programs.alive == []
    assert set(programs.temporary.iterdir()) == before
    assert json.loads((programs.folder / "interrupted.json").read_text())["status"] == "interrupted"
