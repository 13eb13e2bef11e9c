"""Shared memory between real processes, which are killed at any time, or do not see the same
/dev/shm.
"""

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

# pauses at a stage, or pushes ones until it is told to end; a shard's attach is the point between
# share and hide
WORKER = """
import itertools, logging, signal, sys
import numpy as np
import psworker
from psworker.transport.grpc import GrpcTransport

logging.basicConfig(level="INFO", format="%(message)s")
address, stage, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
attach = GrpcTransport.attach

def here(name, *rest):
    print(name, *rest)
    if stage == name:
        signal.pause()

def attach_slowly(lane, shard, request, timeout):
    here("offered", request.name)
    answer = attach(lane, shard, request, timeout)
    here("attached", request.name)
    return answer

GrpcTransport.attach = attach_slowly
with psworker.Client(address, connect_timeout=5.0, wait_timeout=30.0) as client:
    here("connected")
    client.register({"w": np.zeros(500_000, np.float32)}, psworker.OptimizerSpec("sgd", lr=1.0))
    for step in itertools.count(1) if steps < 0 else range(1, steps + 1):
        client.push_pull({"w": np.ones(500_000, np.float32)})
        print("step", step)
    print("ends with", client.pull()["w"].min())
"""


# a job of torch
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


def servers(programs: Programs, *within: str) -> tuple[list[Program], str]:
    """Two shards, and the first one's address. within: a command that starts them."""
    settings = ("--bind", "127.0.0.1:0", "--policy", "async", "--lease", "2s")
    first = start(programs, within, "ps-server", "--shard", "0/2", *settings)
    address = address_of(first)
    second = start(programs, within, "ps-server", "--shard", "1/2", "--join", address, *settings)
    address_of(second)
    return [first, second], address


def start(programs: Programs, within: tuple[str, ...], command: str, *args: object) -> Program:
    if not within:
        return programs.fork(command, *args)
    return programs.start(within[0], *within[1:], str(BIN / command), *args)


def worker(
    programs: Programs, address: str, stage: str = "none", steps: int = -1, *within: str
) -> Program:
    return start(programs, within, "python", programs.folder / "train.py", address, stage, steps)


def mapped(program: Program) -> dict[str, bool]:
    """Names of our files in a process's memory, and whether they still have that name."""
    try:
        maps = Path(f"/proc/{program.pid}/maps").read_text()
    except OSError:
        return {}
    return {
        name: not gone
        for name, gone in re.findall(r"/dev/shm/(paramserver-\w+)( \(deleted\))?$", maps, re.M)
    }


def offered(program: Program) -> str:
    return program.wait_for("offered").split()[1]


def kill(program: Program) -> None:
    program.send(signal.SIGKILL)
    program.wait()


def test_normal_end_leaves_nothing(programs: Programs) -> None:
    """While it trains, all three map one file that has no name; then nobody does."""
    shards, address = servers(programs)
    client = worker(programs, address, steps=300)
    client.wait_for("step 5")
    together = [mapped(program) for program in (client, *shards)]

    assert together == [{offered(client): False}] * 3
    assert client.wait() == 0, client.said
    assert "ends with -300.0" in client.out
    assert "shared_memory_used shards=[0, 1]" in client.err
    until(lambda: not any(map(mapped, shards)), "the servers let go of a worker that left")
    assert not (SHM / offered(client)).exists()


def test_worker_killed_at_any_stage_leaves_nothing(programs: Programs) -> None:
    """A file has a name between offer and attach only; one that is left then goes with the next
    who shares memory.
    """
    shards, address = servers(programs)
    names = set()
    for stage in STAGES:
        killed = worker(programs, address, stage)
        killed.wait_for(stage if stage != "pushing" else "step 5")
        names |= set(mapped(killed))
        if stage in ("offered", "attached"):
            assert mapped(killed) == {offered(killed): True}
            assert stat.S_IMODE((SHM / offered(killed)).stat().st_mode) == 0o600
        kill(killed)
    last = worker(programs, address, steps=3)

    assert last.wait() == 0, last.said
    assert len(names) == 3
    assert not [name for name in names if (SHM / name).exists()]
    until(lambda: not any(map(mapped, shards)), "the servers let go of what the dead had shared")
    assert len(set(weights_of(address)["w"])) == 1


@pytest.mark.parametrize("victim", ["a server", "everybody"])
def test_server_killed_while_pushes_go_on_leaves_nothing(victim: str, programs: Programs) -> None:
    shards, address = servers(programs)
    client = worker(programs, address)
    client.wait_for("step 5")
    names = set(mapped(client))
    for killed in {"a server": shards[1:], "everybody": [*shards, client]}[victim]:
        kill(killed)

    assert names == {offered(client)}
    if victim != "everybody":
        assert client.wait() == 1
        assert "UnreachableError" in client.err
    assert not [name for name in names if (SHM / name).exists()]


def trained(programs: Programs, lanes: str) -> str:
    """A job of 2 servers and 2 workers, 20 steps of Adam, all of them processes: the weights'
    digest.
    """
    settings = ("--bind", "127.0.0.1:0", "--min-workers", 2)
    first = programs.fork("ps-server", "--shard", "0/2", *settings)
    address = address_of(first)
    address_of(programs.fork("ps-server", "--shard", "1/2", "--join", address, *settings))
    command = ("--ps", address, "--lanes", lanes, "job.py")
    workers = [programs.fork("ps-worker", "--worker-rank", rank, *command) for rank in range(2)]
    for worker in workers:
        assert worker.wait() == 0, worker.said
        assert ("shared_memory_used" in worker.said) is (lanes == "shm")
    return digest(address)


def test_processes_train_to_the_same_weights_over_either_lane(programs: Programs) -> None:
    programs.script(SCRIPT, "job.py")

    assert trained(programs, "grpc") == trained(programs, "shm")


# ---- another /dev/shm ----------------------------------------------------------------------------


@pytest.fixture
def small_shm(programs: Programs) -> tuple[str, ...]:
    """A command that starts another one with a /dev/shm of its own, 1 MiB large."""
    script = 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"'
    within = ("unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh")
    if (
        shutil.which("unshare") is None
        or programs.run(str(shutil.which("unshare")), *within[1:], "true").wait()
    ):
        pytest.skip("this user may not mount a tmpfs in a mount namespace of its own")
    return (str(shutil.which("unshare")), *within[1:])


def test_too_small_memory_falls_back_with_one_line_that_says_why(
    small_shm: tuple[str, ...], programs: Programs
) -> None:
    _, address = servers(programs)
    client = worker(programs, address, "none", 20, *small_shm)

    assert client.wait() == 0, client.said
    assert "ends with -20.0" in client.out
    lines = [line for line in client.err.splitlines() if "shared_memory" in line]
    assert len(lines) == 1
    assert lines[0].startswith(
        "shared_memory_unavailable reason=/dev/shm is too small: 3.8 MiB are needed and "
        "1.0 MiB are free"
    )


def test_server_that_sees_another_folder_is_not_shared_with(
    small_shm: tuple[str, ...], programs: Programs
) -> None:
    """The same host name, network and user."""
    shards, address = servers(programs, *small_shm)
    client = worker(programs, address, steps=20)

    assert client.wait() == 0, client.said
    assert "ends with -20.0" in client.out
    lines = [line for line in client.err.splitlines() if "shared_memory" in line]
    name = offered(client)
    assert lines == [
        f"shared_memory_unavailable reason=shard 0: /dev/shm/{name}: No such file or directory"
    ]
    assert not (SHM / name).exists()
    assert not any(map(mapped, shards))
