"""Shared memory between real processes that are killed at any stage or have other Unix sockets."""

import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.programs import BIN, Program, Programs, programs_in
from tests.support.shared_memory import mapped_count
from tests.support.workers import digest, until, weights_of

STAGES = ("connected", "offered", "attached", "pushing")

# Pauses at a stage, or pushes ones until it is killed. At the stage `offered` the memory is shared,
# and at `attached` shard 0 has attached it.
WORKER = """
import itertools, logging, signal, sys
import numpy as np
import psworker
from psworker.transport.grpc_transport import GrpcTransport

logging.basicConfig(level="INFO", format="%(message)s")
address, stage, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
offer = GrpcTransport.offer_memory

def here(name, *rest):
    print(name, *rest)
    if stage == name:
        signal.pause()

def offer_slowly(lane, shard, header, share, timeout):
    def shared():
        descriptor = share()
        here("offered")
        return descriptor
    offer(lane, shard, header, shared, timeout)
    here("attached")

GrpcTransport.offer_memory = offer_slowly
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


def mapped(*programs: Program) -> list[int]:
    """Return how many regions of shared memory each process has mapped."""
    return [mapped_count(program.pid) for program in programs]


def lanes_of(worker: Program) -> list[str]:
    return [line for line in worker.err.splitlines() if line.startswith("lanes_chosen")]


def kill(program: Program) -> None:
    program.send(signal.SIGKILL)
    program.wait()


def test_a_normal_exit_leaves_no_shared_memory(programs: Programs) -> None:
    """During training all three processes map one region; afterwards none of them does."""
    shards, address = start_servers(programs)
    client = start_worker(programs, address, steps=300)
    client.wait_for("step 5")

    assert mapped(client, *shards) == [1, 1, 1]
    assert client.wait() == 0, client.output
    assert "ends with -300.0" in client.out
    assert "shared_memory_used shards=[0, 1]" in client.err
    until(lambda: not any(mapped(*shards)), "the servers let go of a worker that left")


def test_a_worker_killed_at_any_stage_leaves_no_shared_memory(programs: Programs) -> None:
    shards, address = start_servers(programs)
    regions = []
    for stage in STAGES:
        killed = start_worker(programs, address, stage)
        killed.wait_for(stage if stage != "pushing" else "step 5")
        regions += mapped(killed)
        kill(killed)
    last = start_worker(programs, address, steps=3)

    assert last.wait() == 0, last.output
    assert regions == [0, 1, 1, 1]
    until(lambda: not any(mapped(*shards)), "the servers let go of what the dead had shared")
    assert len(set(weights_of(address)["w"])) == 1


def test_a_worker_ends_with_an_error_after_a_shard_is_killed(programs: Programs) -> None:
    shards, address = start_servers(programs)
    client = start_worker(programs, address)
    client.wait_for("step 5")
    kill(shards[1])

    assert client.wait() == 1
    assert "UnreachableError" in client.err
    kill(shards[0])


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
    """Return a command prefix that mounts a private /dev/shm of 64 KiB, as containers have one."""
    script = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"'
    within = ("unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh")
    if (
        shutil.which("unshare") is None
        or programs.run(str(shutil.which("unshare")), *within[1:], "true").wait()
    ):
        pytest.skip("this user may not mount a tmpfs in a mount namespace of its own")
    return (str(shutil.which("unshare")), *within[1:])


def test_processes_with_a_small_common_folder_share_memory(
    small_shm: tuple[str, ...], programs: Programs
) -> None:
    """The worker has the /dev/shm of shard 0, as containers with one volume. Shard 1 has its own.
    A region of 3.8 MiB does not count there.
    """
    shards, address = start_servers(programs, *small_shm)
    enter = ("--preserve-credentials", "--user", "--mount", f"--target={shards[0].pid}")
    within = (str(shutil.which("nsenter")), *enter)  # it comes with unshare
    client = start_worker(programs, address, "none", 20, *within)

    assert client.wait() == 0, client.output
    assert "ends with -20.0" in client.out
    (line,) = [line for line in client.err.splitlines() if "shared_memory" in line]
    assert line.startswith("shared_memory_used shards=[0] not_shared=shard 1: the server's Unix")
    assert lanes_of(client) == ["lanes_chosen lanes=auto unix=[0] tcp=[1]"]


def test_servers_whose_unix_socket_is_elsewhere_are_reached_over_tcp(
    small_shm: tuple[str, ...], programs: Programs
) -> None:
    """Host name, network and user are the same."""
    shards, address = start_servers(programs, *small_shm)
    client = start_worker(programs, address, steps=20)

    assert client.wait() == 0, client.output
    assert "ends with -20.0" in client.out
    (line,) = [line for line in client.err.splitlines() if "shared_memory" in line]
    assert line.startswith(
        "shared_memory_unavailable reason=shard 0: the server's Unix socket /dev/shm/paramserver-"
    )
    assert lanes_of(client) == ["lanes_chosen lanes=auto tcp=[0, 1]"]
    assert not any(mapped(*shards))
