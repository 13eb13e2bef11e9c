"""The processes of groups: ps-run --group-size, torchrun with ps-worker --group, and their ends."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_port
from tests.support.programs import BIN, Program, Programs, descendants, programs_in
from tests.support.settings_coverage import run_setting, worker_setting

# rank 0 of worker 0 waits in gloo or in a call of the job when another rank ends
SCRIPT = """
import os, signal, sys, time, torch, psworker
import torch.distributed as dist
from torch import nn

torch.manual_seed(0)
layers = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)
model = nn.Sequential(*layers)
rows = torch.randn(96, 4)
data = rows, rows.sum(1, keepdim=True)
me = os.environ["PS_WORKER_RANK"] + os.environ["RANK"]
falls = dict(pair.split(":") for pair in os.environ.get("FALLS", "").split(",") if pair)
with psworker.connect(wait_timeout=60) as job:
    wrapped = nn.parallel.DistributedDataParallel(model) if "DDP" in os.environ else model
    if "FSDP2" in os.environ:
        from torch.distributed.fsdp import fully_shard
        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), wrapped)
    if job.client.worker and me == "00":
        print(job.client.status()["workers"][0]["device"], flush=True)
    print("here", me, dist.get_world_size(), job.is_first, flush=True)
    for x, y in job.batches(data, batch_size=4, epochs=int(os.environ.get("EPOCHS", 1)), seed=3):
        nn.functional.mse_loss(wrapped(x), y).backward()
        fall = falls.get(f"{me}-{job.version}")
        if fall and not os.path.exists(f"fallen-{me}-{job.version}"):
            open(f"fallen-{me}-{job.version}", "x").close()
            print("falls", me, time.time(), flush=True)
            if fall == "error":
                raise RuntimeError("a bug of the script")
            os.kill(os.getpid(), signal.Signals[fall])
        optimizer.step()
        optimizer.zero_grad()
print("done", me, job.version, flush=True)
"""
STEPS = 12
"""Of one epoch with two ranks in all."""


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as programs:
        programs.script(SCRIPT)
        yield programs


def group_run(programs: Programs, *flags: object, **environment: object) -> Program:
    """Start a run of one or two workers with two ranks each."""
    return programs.start(
        "ps-run", "--group-size", 2, "--summary", "end.json", *flags, "train.py", **environment
    )


def result(programs: Programs) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((programs.folder / "end.json").read_text())
    return found


@run_setting("group_size")
def test_a_run_starts_the_ranks_of_each_worker(programs: Programs) -> None:
    """DDP finds its process group; all ranks end after the same step, and leave nothing."""
    run = group_run(programs, DDP=1)

    assert run.wait() == 0, run.output
    for rank, mark in enumerate(["[w0]", "[w0] [rank 1]"]):
        assert f"{mark} here 0{rank} 2 {rank == 0}" in run.out
        assert f"{mark} done 0{rank} {STEPS}" in run.out
    assert "[w0] 2 ranks, cpu" in run.out
    assert result(programs)["samples"] == 96
    assert list(programs.temporary.iterdir()) == []


@worker_setting("group")
def test_a_group_needs_the_variables_of_a_launcher(programs: Programs) -> None:
    worker = programs.run("ps-worker", "--group", "--ps", "127.0.0.1:1", "train.py")

    assert worker.wait() == 2
    assert "RANK and WORLD_SIZE" in worker.err
    assert "torchrun" in worker.err


@pytest.mark.parametrize("kind", ["plain", "DDP", "FSDP2"])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_others_end_when_a_rank_is_killed(programs: Programs, rank: int, kind: str) -> None:
    """A rank that waits in gloo cannot be interrupted; a restarted group takes the place."""
    environment = {"FALLS": f"0{rank}-3:SIGKILL", kind: 1}
    run = group_run(programs, "--workers", 2, **environment)
    fallen = float(run.wait_for("falls").split()[-1])
    run.wait_for(f"psworker: rank {1 - rank} ends: rank {rank} of this group has ended")

    assert time.time() - fallen < 2
    assert run.wait(120) == 0, run.output
    assert result(programs)["samples"] == 96
    assert result(programs)["restarts"] == 1


def test_an_error_of_one_rank_is_the_error_of_the_run(programs: Programs) -> None:
    run = group_run(programs, "--max-restarts", 0, FALLS="01-3:error")

    assert run.wait() == 1, run.output
    assert "a bug of the script" in run.output
    assert "rank 0 ends: rank 1 of this group has ended" in run.output


@pytest.mark.parametrize("rank", [0, 1])
def test_the_others_end_when_a_rank_is_stopped(programs: Programs, rank: int) -> None:
    """They cannot know whether it goes on; the launcher ends it then."""
    run = group_run(programs, "--lease", 2, FALLS=f"0{rank}-3:SIGSTOP")
    fallen = float(run.wait_for("falls").split()[-1])
    run.wait_for("has shown no sign of life", seconds=30)

    assert 3 < time.time() - fallen < 6
    assert run.wait(60) == 0, run.output
    assert result(programs)["restarts"] == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_lets_the_group_leave(programs: Programs, rank: int) -> None:
    run = group_run(programs, "--workers", 2, EPOCHS=500)
    run.wait_for("here 1", times=2)
    run.wait_for("here 0", times=2)
    os.kill(rank_pid(run, "0", rank), signal.SIGTERM)
    run.wait_for("script_ended")
    run.send(signal.SIGTERM)

    assert run.wait() == 128 + signal.SIGTERM, run.output
    assert "of this group has ended" not in run.output


def rank_pid(run: Program, worker: str, rank: int) -> int:
    """Return the process of a rank."""
    for pid in descendants(run.pid):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        own = {f"PS_WORKER_RANK={worker}".encode(), f"RANK={rank}".encode()}
        if own <= set(variables):
            return pid
    raise AssertionError("no such rank")


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_kills_change_neither_data_nor_weights(programs: Programs, kind: str) -> None:
    """With --on-worker-loss wait and the log a run with kills ends with the same bytes."""
    flags = ("--workers", 2, "--on-worker-loss", "wait:120", "--durability", "log")
    undisturbed = group_run(programs, *flags, "--data-dir", "undisturbed", EPOCHS=4, **{kind: 1})
    assert undisturbed.wait(120) == 0, undisturbed.output
    expected = result(programs)

    kills = int(os.environ.get("GROUP_KILLS", "3"))
    falls = ",".join(
        f"{number % 2}{number // 2 % 2}-{2 + number * 20 // kills}:SIGKILL"
        for number in range(kills)
    )
    more = ("--data-dir", "killed", "--max-restarts", kills)
    run = group_run(programs, *flags, *more, EPOCHS=4, FALLS=falls, **{kind: 1})

    assert run.wait(60 * kills) == 0, run.output
    found = result(programs)
    assert found["restarts"] == kills
    assert found["samples"] == expected["samples"] == 4 * 96
    assert found["weights_sha256"] == expected["weights_sha256"]


def test_torchrun_restarts_a_group(programs: Programs) -> None:
    """torch itself would find the addresses of the processes before."""
    address = f"127.0.0.1:{free_port()}"
    programs.start("ps-server", "--shard", "0/1", "--bind", address).wait_for("listening")
    line = ("--nproc-per-node", 2, "--max-restarts", 2, "--master-port", 29731, "--no-python")
    worker = (BIN / "ps-worker", "--group", "--ps", address, "--worker-rank", 0, "train.py")
    falls = "00-3:SIGKILL,01-7:SIGKILL"
    launcher = programs.start("torchrun", *line, *worker, FALLS=falls, DDP=1, PS_WORKER_RANK=0)

    assert launcher.wait(120) == 0, launcher.output
    assert f"done 00 {STEPS}" in launcher.out
