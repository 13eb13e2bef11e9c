"""Ctrl-C while servers are stopped by SIGSTOP: each call of a script returns within two seconds."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.lanes import each_lane
from tests.support.machine_time import machine_seconds
from tests.support.process_job import stop
from tests.support.programs import Program, Programs, descendants, programs_in
from tests.support.workers import until

pytestmark = pytest.mark.timing

STOPPING_SECONDS = 2.0
"""From Ctrl-C in a call to psworker.Stopping in the script."""
LEAVING_SECONDS = 1.0
"""From psworker.Stopping to the exit of the process."""
SPARE_SECONDS = 1.0
"""Tolerance for a busy machine."""
GRACE_SECONDS = 10.0
"""Default of --grace, after which ps-run kills."""

SCRIPT = """
import os, sys, threading, torch, psworker

def wait(call):
    if sys.argv[1] == call:
        print("waits", flush=True)
        while not os.path.exists("go"):
            threading.Event().wait(0.01)

with psworker.connect() as job:
    try:
        model = torch.nn.Linear(1, 1)
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        wait("pull")
        job.pull()
        wait("data")
        for number, (x,) in enumerate(job.batches((torch.ones(400_000, 1),), batch_size=4)):
            model(x).sum().backward()
            job.report(loss=1.0)
            wait("push")
            optimizer.step()
            if number == 10:
                print("trains", flush=True)
    finally:
        print("ended with", sys.exc_info()[0].__name__, flush=True)
"""

CALLS = {"pull": "off", "data": "off", "push": "off", "push that overlaps": "on"}


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as programs:
        yield programs


def two_servers(programs: Programs) -> tuple[list[Program], str]:
    servers, addresses = [], list[str]()
    for shard in range(2):
        port = programs.folder / f"port{shard}"
        flags = (
            "--bind",
            "127.0.0.1:0",
            "--port-file",
            port,
            "--shard",
            f"{shard}/2",
            "--policy",
            "sync",
        )
        servers.append(programs.fork("ps-server", *flags))
        until(port.exists, "a port")
        addresses.append(f"127.0.0.1:{port.read_text().strip()}")
    return servers, ",".join(addresses)


@each_lane
def test_ctrl_c_interrupts_every_call_to_stopped_servers(programs: Programs, lanes: str) -> None:
    servers, addresses = two_servers(programs)
    programs.script(SCRIPT)
    workers = {
        call: programs.fork(
            "ps-worker",
            "--ps",
            addresses,
            "--lanes",
            lanes,
            "--overlap",
            overlap,
            "train.py",
            call.split()[0],
        )
        for call, overlap in CALLS.items()
    }
    for worker in workers.values():
        worker.wait_for("waits")
    for server in servers:
        stop(server)
    (programs.folder / "go").touch()
    for worker in workers.values():
        worker.wait_for("heartbeats_unanswered")

    for call, worker in workers.items():
        began = time.monotonic()
        worker.send(signal.SIGINT)
        worker.wait_for("ended with Stopping")
        stopping = machine_seconds(began)
        assert worker.wait() == 130

        assert stopping < STOPPING_SECONDS + SPARE_SECONDS, call
        assert machine_seconds(began) < STOPPING_SECONDS + LEAVING_SECONDS + SPARE_SECONDS, call


def server_pids(run: Program) -> list[int]:
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(run.pid)}
    return [pid for pid, line in lines.items() if b"--shard" in line]


def test_ctrl_c_to_ps_run_resumes_stopped_servers_to_save(programs: Programs) -> None:
    programs.script(SCRIPT)
    run = programs.start(
        "ps-run", "--servers", 2, "--workers", 2, "--data-dir", "data", "train.py", "never"
    )
    run.wait_for("[w0] trains")
    servers = server_pids(run)
    for pid in servers:
        os.kill(pid, signal.SIGSTOP)
    run.wait_for("heartbeats_unanswered")

    began = time.monotonic()
    run.send(signal.SIGINT)

    assert run.wait() == 130
    assert len(servers) == 2
    assert machine_seconds(began) < GRACE_SECONDS, run.output
    assert "snapshot_written" in run.err
