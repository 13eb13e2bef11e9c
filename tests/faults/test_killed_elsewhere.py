"""A worker is killed on a host without shard 0; the shard on its host proves the death."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.ports import free_ports
from tests.support.process_job import MODULES
from tests.support.programs import BIN, LIMIT, Program, Programs, programs_in
from tests.support.workers import status, until

pytestmark = pytest.mark.timing

LEASE = 20.0
WITHIN = 1.0

# pushes, and prints when each push has counted
SCRIPT = """
import time
import numpy as np
import psworker
with psworker.Client(rank=int(__import__("os").environ["PS_WORKER_RANK"])) as client:
    client.register({"w": np.zeros(8, np.float32)}, psworker.OptimizerSpec("sgd", lr=1.0))
    weights = client.pull()
    while True:
        client.push_pull({"w": np.ones(8, np.float32)}, out=weights)
        print("counted", time.monotonic(), flush=True)
"""


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare")
    if subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", "true"], check=False
    ).returncode:
        pytest.skip("this system has no PID namespaces")
    with programs_in(tmp_path) as programs:
        programs.script(SCRIPT)
        yield programs


def push_times(worker: Program) -> list[float]:
    return [
        float(line.split()[1]) for line in worker.out.splitlines() if line.startswith("counted ")
    ]


@pytest.mark.parametrize("beside", ["shard 1", "no server"])
def test_the_shard_on_a_workers_host_proves_its_death(programs: Programs, beside: str) -> None:
    """Without such a shard the lease decides: an absent PID of another namespace proves nothing."""
    first, second = (f"127.0.0.1:{port}" for port in free_ports(2))
    apart = (str(shutil.which("unshare")), "--pid", "--fork", "--kill-child", "--mount-proc")
    flags = ("--lease", f"{LEASE:g}s", "--min-workers", 2)
    programs.start(*apart, BIN / "ps-server", "--shard", "0/2", "--bind", first, *flags)
    line = (BIN / "ps-server", "--shard", "1/2", "--bind", second, "--join", first)
    programs.start(*map(str, (*(apart if beside == "no server" else ()), *line)))
    workers = [
        programs.start(
            "ps-worker",
            "--ps",
            first,
            "--device",
            "cpu",
            "train.py",
            PYTHONPATH=MODULES,
            PS_WORKER_RANK=rank,
        )
        for rank in range(2)
    ]
    for worker in workers:
        worker.wait_for("counted", times=20)

    killed_at = time.monotonic()
    workers[1].end()
    if beside == "no server":
        until(lambda: time.monotonic() - killed_at > 2 * WITHIN, "several checks of processes")
        assert {row["state"] for row in status(first)["workers"]} == {"active"}
        return
    pushes_before = len(push_times(workers[0]))
    workers[0].wait_for("counted", times=pushes_before + 5, seconds=LIMIT)
    times = [killed_at, *(each for each in push_times(workers[0]) if each > killed_at)]
    stall = max(b - a for a, b in pairwise(times))
    print(f"\nthe other one stood still for {stall:.2f} s")
    assert stall < WITHIN
    (lost,) = (row for row in status(first)["workers"] if row["rank"] == 1)
    assert (lost["state"], lost["reason"]) == ("lost", "its process has ended")
