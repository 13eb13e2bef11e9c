"""Shared memory between real processes that are killed at any stage or mount different /dev/shm."""

import re
import shutil
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.programs import BIN, Program, Programs, programs_in
from tests.support.workers import digest, until, weights_of

SHM = Path("/dev/shm")
STAGES = ("connected", "offered", "attached", "pushing")

# Pauses at a stage, or pushes ones until it is killed. The stage `offered` is in the attach call of
# a shard, between share and hide.
WORKER = """
import itertools, logging, signal, sys
import numpy as np
import psworker
from pscommon.wire.requests import ATTACH_MEMORY
from psworker.transport.grpc_transport import GrpcTransport

logging.basicConfig(level="INFO", format="%(message)s")
address, stage, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
send = GrpcTransport.request

def here(name, *rest):
    print(name, *rest)
    if stage == name:
        signal.pause()

def attach_slowly(lane, row, message, *rest):
    if row is not ATTACH_MEMORY:
        return send(lane, row, message, *rest)
    here("offered", message.name)
    answer = send(lane, row, message, *rest)
    here("attached", message.name)
    return answer

GrpcTransport.request = attach_slowly
with psworker.Client(address, connect_timeout=5.0, wait_timeout=30.0) as client:
    here("connected")
    client.register({"w": np.zeros(500_000, np.float32)}, psworker.OptimizerSpec("sgd", lr=1.0))
    for step in itertools.count(1) if steps < 0 else range(1, steps + 1):
        client.push_pull({"w": np.ones(500_000, np.float32)})
        print("step", step)
    print("ends with", client.pull()["w"].min())
"""


# a torch job
SCRIPT = """
import torch, psworker
torch.manual_seed(0)
layers = torch.nn.Linear(6, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 3)
model = torch.nn.Sequential(*layers)
data = torch.rand(160, 6), torch.randint(0, 3, (160,))
with psworker.connect() as job:
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.05), model)
    for x, y in job.batches(data, batch_size=8, epochs=2, seed=3):
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert job.version == 20
"""


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as programs:
        programs.script(WORKER)
        yield programs


def address_of(server: Program) -> str:
    line = server.wait_for("listening")
    found = re.search(r"127\.0\.0\.1:\d+", line)
    assert found, line
    return found[0]


def start_servers(programs: Programs, *within: str) -> tuple[list[Program], str]:
    """Start two shards, with the prefix `within`; return them and the address of shard 0."""
    settings = ("--bind", "127.0.0.1:0", "--policy", "async", "--lease", "2s")
    first = start_program(programs, within, "ps-server", "--shard", "0/2", *settings)
    address = address_of(first)
    second = start_program(
        programs, within, "ps-server", "--shard", "1/2", "--join", address, *settings
    )
    address_of(second)
    return [first, second], address


def start_program(
    programs: Programs, within: tuple[str, ...], command: str, *args: object
) -> Program:
    if not within:
        return programs.fork(command, *args)
    return programs.start(within[0], *within[1:], str(BIN / command), *args)


def start_worker(
    programs: Programs, address: str, stage: str = "none", steps: int = -1, *within: str
) -> Program:
    return start_program(
        programs, within, "python", programs.folder / "train.py", address, stage, steps
    )


def mapped_files(program: Program) -> dict[str, bool]:
    """Return the names of mapped paramserver files and whether each file still exists."""
    try:
        maps = Path(f"/proc/{program.pid}/maps").read_text()
    except OSError:
        return {}
    return {
        name: not deleted
        for name, deleted in re.findall(r"/dev/shm/(paramserver-\w+)( \(deleted\))?$", maps, re.M)
    }


def offered_name(program: Program) -> str:
    return program.wait_for("offered").split()[1]


def lanes_of(worker: Program) -> list[str]:
    return [line for line in worker.err.splitlines() if line.startswith("lanes_chosen")]


def kill(program: Program) -> None:
    program.send(signal.SIGKILL)
    program.wait()


def test_a_normal_exit_leaves_no_shared_memory(programs: Programs) -> None:
    """During training all three processes map one unlinked file; afterwards none of them does."""
    shards, address = start_servers(programs)
    client = start_worker(programs, address, steps=300)
    client.wait_for("step 5")
    mappings = [mapped_files(program) for program in (client, *shards)]

    assert mappings == [{offered_name(client): False}] * 3
    assert client.wait() == 0, client.output
    assert "ends with -300.0" in client.out
    assert "shared_memory_used shards=[0, 1]" in client.err
    until(lambda: not any(map(mapped_files, shards)), "the servers let go of a worker that left")
    assert not (SHM / offered_name(client)).exists()


def test_a_worker_killed_at_any_stage_leaves_no_shared_memory(programs: Programs) -> None:
    """A file has a name only between offer and attach. The next worker that shares memory removes a
    remaining one.
    """
    shards, address = start_servers(programs)
    names = set()
    for stage in STAGES:
        killed = start_worker(programs, address, stage)
        killed.wait_for(stage if stage != "pushing" else "step 5")
        names |= set(mapped_files(killed))
        if stage in ("offered", "attached"):
            assert mapped_files(killed) == {offered_name(killed): True}
            assert stat.S_IMODE((SHM / offered_name(killed)).stat().st_mode) == 0o600
        kill(killed)
    last = start_worker(programs, address, steps=3)

    assert last.wait() == 0, last.output
    assert len(names) == 3
    assert not [name for name in names if (SHM / name).exists()]
    until(
        lambda: not any(map(mapped_files, shards)), "the servers let go of what the dead had shared"
    )
    assert len(set(weights_of(address)["w"])) == 1


@pytest.mark.parametrize("victim", ["a server", "all processes"])
def test_servers_killed_during_pushes_leave_no_shared_memory(
    victim: str, programs: Programs
) -> None:
    shards, address = start_servers(programs)
    client = start_worker(programs, address)
    client.wait_for("step 5")
    names = set(mapped_files(client))
    for killed in {"a server": shards[1:], "all processes": [*shards, client]}[victim]:
        kill(killed)

    assert names == {offered_name(client)}
    if victim != "all processes":
        assert client.wait() == 1
        assert "UnreachableError" in client.err
    assert not [name for name in names if (SHM / name).exists()]


def train_job(programs: Programs, lanes: str) -> str:
    """Train a job of 2 servers and 2 workers for 20 Adam steps; return the weights' digest."""
    settings = ("--bind", "127.0.0.1:0", "--min-workers", 2)
    first = programs.fork("ps-server", "--shard", "0/2", *settings)
    address = address_of(first)
    address_of(programs.fork("ps-server", "--shard", "1/2", "--join", address, *settings))
    command = ("--ps", address, "--lanes", lanes, "job.py")
    workers = [programs.fork("ps-worker", "--worker-rank", rank, *command) for rank in range(2)]
    for worker in workers:
        assert worker.wait() == 0, worker.output
        assert ("shared_memory_used" in worker.output) is (lanes == "shm")
    return digest(address)


def test_both_lanes_train_to_the_same_weights(programs: Programs) -> None:
    programs.script(SCRIPT, "job.py")

    assert train_job(programs, "grpc") == train_job(programs, "shm")


# ---- another /dev/shm ----------------------------------------------------------------------------


@pytest.fixture
def small_shm(programs: Programs) -> tuple[str, ...]:
    """Return a command prefix that mounts a private /dev/shm of 1 MiB."""
    script = 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"'
    within = ("unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh")
    if (
        shutil.which("unshare") is None
        or programs.run(str(shutil.which("unshare")), *within[1:], "true").wait()
    ):
        pytest.skip("this user may not mount a tmpfs in a mount namespace of its own")
    return (str(shutil.which("unshare")), *within[1:])


def test_a_too_small_shm_falls_back_with_one_log_line(
    small_shm: tuple[str, ...], programs: Programs
) -> None:
    _, address = start_servers(programs)
    client = start_worker(programs, address, "none", 20, *small_shm)

    assert client.wait() == 0, client.output
    assert "ends with -20.0" in client.out
    lines = [line for line in client.err.splitlines() if "shared_memory" in line]
    assert len(lines) == 1
    assert lines[0].startswith(
        "shared_memory_unavailable reason=/dev/shm is too small: 3.8 MiB are needed and "
        "1.0 MiB are free"
    )
    assert lanes_of(client) == ["lanes_chosen lanes=auto tcp=[0, 1]"]  # sockets are in /dev/shm


def test_a_too_small_shm_of_both_sides_leaves_the_unix_socket(
    small_shm: tuple[str, ...], programs: Programs
) -> None:
    """The worker has the /dev/shm of shard 0; shard 1 has its own."""
    shards, address = start_servers(programs, *small_shm)
    enter = ("--preserve-credentials", "--user", "--mount", f"--target={shards[0].pid}")
    within = (str(shutil.which("nsenter")), *enter)  # it comes with unshare
    client = start_worker(programs, address, "none", 20, *within)

    assert client.wait() == 0, client.output
    assert "ends with -20.0" in client.out
    assert "shared_memory_unavailable reason=/dev/shm is too small" in client.err
    assert lanes_of(client) == ["lanes_chosen lanes=auto unix=[0] tcp=[1]"]


def test_servers_with_another_shm_are_reached_over_grpc(
    small_shm: tuple[str, ...], programs: Programs
) -> None:
    """Host name, network and user are the same."""
    shards, address = start_servers(programs, *small_shm)
    client = start_worker(programs, address, steps=20)

    assert client.wait() == 0, client.output
    assert "ends with -20.0" in client.out
    lines = [line for line in client.err.splitlines() if "shared_memory" in line]
    name = offered_name(client)
    assert lines == [
        f"shared_memory_unavailable reason=shard 0: /dev/shm/{name}: No such file or directory"
    ]
    assert not (SHM / name).exists()
    assert not any(map(mapped_files, shards))
