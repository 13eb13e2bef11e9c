"""Tokens that ps-run and DistributedTraining make for servers on this machine."""

import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from pscommon.core.errors import PSError
from pscommon.security.credentials import process_credentials
from pscommon.security.tokens import init_tokens
from pscommon.system.local_jobs import local_jobs, local_shards
from psworker import Client, DistributedTraining, training
from tests.support.programs import Programs, programs_in

STRANGER = """
import sys
from psworker import Client, PSError
try:
    Client(sys.argv[1], observe=True, connect_timeout=20)
except PSError as error:
    print(error)
    sys.exit(error.exit_code)
"""

SCRIPT = """
import os
import torch, psworker
model = torch.nn.Linear(2, 1)
with psworker.connect() as job:
    print("servers", os.environ["PS_SERVERS"], flush=True)
    with open("go") as gate:
        gate.read()
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for x, y in job.batches((torch.rand(40, 2), torch.rand(40, 1)), batch_size=10):
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Programs]:
    """Programs with a registry of jobs of their own; a stranger has another one."""
    for user in ("owner", "stranger"):
        (tmp_path / user).mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "owner"))
    with programs_in(tmp_path) as programs:
        programs.script(SCRIPT)
        programs.script(STRANGER, "stranger.py")
        yield programs


@pytest.fixture
def address(programs: Programs) -> Iterator[str]:
    """A run whose worker trains when a file has been written; the address of its first server."""
    gate = programs.folder / "go"
    os.mkfifo(gate)
    run = programs.start("ps-run", "--servers", 2, "--workers", 1, "--device", "cpu", "train.py")
    yield run.wait_for("servers ").split()[-1]
    gate.write_text("")
    assert run.wait() == 0, run.output
    assert not list(programs.temporary.glob("ps-run-*"))


def test_a_run_is_closed_to_processes_without_its_tokens(programs: Programs, address: str) -> None:
    elsewhere = {"XDG_RUNTIME_DIR": programs.folder / "stranger"}

    refused = [
        programs.run("ps-ctl", "--ps", address, "status", **elsewhere),
        programs.run("ps-ctl", "--ps", address, "stop", "--yes", **elsewhere),
        programs.run("python", "stranger.py", address, **elsewhere),
    ]

    assert [program.wait() for program in refused] == [13, 13, 13]
    assert all("UNAUTHENTICATED" in each.output for each in refused[:2])
    assert all("token" in each.output for each in refused)


def test_a_token_of_another_role_is_named(programs: Programs, address: str) -> None:
    (folder,) = programs.temporary.glob("ps-run-*")
    lines = (folder / "tokens").read_text().splitlines(keepends=True)
    workers = programs.folder / "workers"
    workers.touch(0o600)
    workers.write_text("".join(line for line in lines if line.startswith("worker ")))

    refused = programs.run("ps-ctl", "--ps", address, "stop", "--yes", PS_TOKEN_FILE=workers)

    assert refused.wait() == 13
    assert "PERMISSION_DENIED" in refused.err
    assert "needs a token of the role admin, and this one is of the role worker" in refused.err


def test_commands_of_the_same_user_find_the_token(programs: Programs, address: str) -> None:
    """Also with --ps, by another name of loopback, by any shard's address, and a Client."""
    local = address.replace("127.0.0.1", "localhost")
    (other,) = [entry.address for entry in local_shards() if entry.shard == 1]

    assert programs.run("ps-ctl", "status").wait() == 0
    assert programs.run("ps-ctl", "--ps", address, "status").wait() == 0
    assert programs.run("ps-ctl", "--ps", local, "status").wait() == 0
    assert programs.run("ps-ctl", "--ps", other, "status").wait() == 0
    assert programs.run("python", "stranger.py", address).wait() == 0
    assert programs.run("python", "stranger.py", other).wait() == 0


def test_tokens_of_a_run_lie_only_in_private_files(programs: Programs, address: str) -> None:
    """They are no argument, variable or output of a process; the folder goes with the run."""
    (folder,) = programs.temporary.glob("ps-run-*")
    (job,) = local_jobs()
    entries = list((programs.folder / "owner/paramserver").iterdir())
    files = (folder / "tokens", *entries)

    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(entries) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert job.address == address
    assert job.role == "admin"
    lines = dict(line.split() for line in (folder / "tokens").read_text().splitlines())
    assert lines["admin"] == job.token
    for pid in programs.alive:
        seen = b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
        assert not [role for role, token in lines.items() if token.encode() in seen]
    assert not any(
        token in log.read_text() for log in folder.glob("*.log") for token in lines.values()
    )


def train() -> dict[str, Any]:
    """Train a small model on own servers."""
    data = TensorDataset(torch.rand(40, 2), torch.rand(40, 1))
    return DistributedTraining().train_distributed(torch.nn.Linear(2, 1), data, nodes=2)


def test_servers_of_a_training_are_closed_to_others(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it runs, the same user finds the token."""
    codes: list[int] = []
    start = training.local_servers

    @contextmanager
    def observed(*args: Any) -> Iterator[str]:
        with start(*args) as address:
            for user in ("stranger", "owner"):
                registry = {"XDG_RUNTIME_DIR": programs.folder / user}
                codes.append(programs.run("ps-ctl", "--ps", address, "status", **registry).wait())
            yield address

    monkeypatch.setattr(training, "local_servers", observed)

    assert train()["nodes_used"] == 2
    assert codes == [13, 0]


def test_two_trainings_at_a_time_have_tokens(programs: Programs) -> None:
    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(lambda _: train(), range(2)))

    assert [result["nodes_used"] for result in results] == [2, 2]


def test_a_training_does_not_use_files_of_another_job(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not even read."""
    for name in ("PS_TOKEN_FILE", "PS_TLS_CA", "PS_TLS_CERT", "PS_TLS_KEY"):
        monkeypatch.setenv(name, str(programs.folder / "missing"))

    assert train()["nodes_used"] == 2

    with pytest.raises(PSError, match="missing"):
        Client("127.0.0.1:1", connect_timeout=0.1)


def test_a_training_ignores_the_token_of_another_job(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of that job sends it again afterwards."""
    init_tokens(programs.folder / "tokens")
    monkeypatch.setenv("PS_TOKEN_FILE", str(programs.folder / "tokens/worker.token"))

    assert train()["nodes_used"] == 2

    with pytest.raises(PSError):
        Client("127.0.0.1:1", connect_timeout=0.1)
    tokens = process_credentials().tokens
    assert tokens is not None
    assert [role for role, _ in tokens()] == ["worker"]
