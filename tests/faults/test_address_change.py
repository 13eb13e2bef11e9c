"""Shard 0 restarts under the same DNS name at another address; workers and shards reconnect
soon.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ports import free_ports
from tests.support.process_job import MODULES, kill
from tests.support.programs import BIN, Program, Programs, programs_in

pytestmark = pytest.mark.timing

NAME = "ps-zero.test"
SECONDS = 5.0
"""Time within which training must continue."""

# pushes without a pause and prints each counted version
SCRIPT = """
import numpy as np
import psworker
with psworker.Client() as client:
    client.register({"w": np.zeros(8, np.float32)}, psworker.OptimizerSpec("sgd", lr=1.0))
    while True:
        result = client.push_pull({"w": np.ones(8, np.float32)}, out=client.pull())
        print("version", result.version, flush=True)
"""


def reason_without_mounts() -> str:
    """Return why a process cannot have its own /etc/hosts here; empty if it can."""
    if os.geteuid() != 0 or not (shutil.which("unshare") and shutil.which("mount")):
        return "needs root, unshare and mount"
    done = subprocess.run(["unshare", "-m", "true"], capture_output=True, text=True, timeout=30)
    return done.stderr.strip()


class HostNames:
    """Starts programs that read `hosts` as /etc/hosts in their own mount namespace."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self.hosts = programs.folder / "hosts"
        self.hosts.touch()

    def set_address(self, address: str) -> None:
        """Let the name resolve to this address. The file is rewritten in place because it is
        mounted.
        """
        with self.hosts.open("r+") as file:
            file.truncate()
            file.write(f"127.0.0.1 localhost\n{address} {NAME}\n")

    def start(self, command: str, *args: object, **environment: object) -> Program:
        unshare = shutil.which("unshare")
        assert unshare is not None
        mounting = f'mount --bind {self.hosts} /etc/hosts && exec "$0" "$@"'
        line = ("-m", "--propagation", "private", "sh", "-c", mounting, BIN / command, *args)
        return self._programs.start(unshare, *line, PYTHONPATH=MODULES, **environment)


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    if reason := reason_without_mounts():
        pytest.skip(reason)
    with programs_in(tmp_path) as programs:
        programs.script(SCRIPT)
        yield programs


@pytest.mark.parametrize("resolver", ["ares", "native"])
def test_training_continues_after_shard_0_changes_its_address(
    programs: Programs, resolver: str
) -> None:
    """Worst case: the name resolves to the old address until the worker has resolved it in vain."""
    host_names = HostNames(programs)
    host_names.set_address("127.0.0.1")
    port, other = free_ports(2)
    setting = {"GRPC_DNS_RESOLVER": resolver}
    data = ("--data-dir", programs.folder / "data", "--durability", "log")

    def shard_0(address: str) -> Program:
        place = ("--shard", "0/2", "--bind", f"{address}:{port}", "--advertise", f"{NAME}:{port}")
        return host_names.start("ps-server", *place, *data, **setting)

    first = shard_0("127.0.0.1")
    place = ("--shard", "1/2", "--bind", f"127.0.0.1:{other}", "--join", f"{NAME}:{port}")
    second = host_names.start("ps-server", *place, *data, **setting)
    worker = host_names.start(
        "ps-worker", "--ps", f"{NAME}:{port}", "--device", "cpu", "train.py", **setting
    )
    worker.wait_for("version", times=20)

    kill(first)
    worker.wait_for("heartbeats_unanswered", seconds=30)
    pushed = worker.out.count("version")
    host_names.set_address("127.0.0.2")
    shard_0("127.0.0.2").wait_for("listening")
    began = time.monotonic()
    worker.wait_for("version", times=pushed + 2)
    seconds = time.monotonic() - began
    print(f"\n{resolver}: training continued after {seconds:.1f} s")
    assert second.process.poll() is None
    assert seconds < SECONDS
