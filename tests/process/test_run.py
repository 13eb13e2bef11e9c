"""ps-run with real processes: its summary, its reproducibility and its recovery."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pscommon.snapshot import SnapshotDirectory
from tests.support.programs import Program, Programs, descendants, programs_in, wait_for_exit
from tests.support.workers import until

# State that a restart must restore: moments, learning rate, BatchNorm statistics, dropout draws.
SCRIPT = """
import os, select, signal, torch, psworker
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
layers = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3)
model = nn.Sequential(*layers)
data = torch.rand(80, 6), torch.randint(0, 3, (80,))
with psworker.connect() as job:
    print("here", job.rank)
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.05), model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    job.resume(scheduler)
    loss = torch.zeros(())
    print("starts at", job.version)
    for x, y in job.batches(data, batch_size=8, epochs=4, seed=3):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        falls = job.stats.steps == 2 and job.rank == 1 and "FALLS" in os.environ
        if falls and not os.path.exists("fallen"):
            open("fallen", "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        servers_fall = job.rank == 0 and "SERVERS_FALL" in os.environ
        shards = os.environ.get(f"SERVERS_FALL_AT_{job.version}", "") if servers_fall else ""
        for shard in map(int, shards):
            if not os.path.exists(f"fallen-{shard}"):
                open(f"fallen-{shard}", "x").close()
                pid = job.client.status()["servers"][shard]["pid"]
                end = os.pidfd_open(pid)
                os.kill(pid, signal.Signals[os.environ["SERVERS_FALL"]])
                if job.version < 10:
                    select.select([end], [], [])
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if job.version == int(os.environ.get("STOP_AT", 0)):
            print("stops at", job.version)
            signal.pause()
    job.report(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
"""
VERSIONS = 20
EARLY = {"SERVERS_FALL_AT_5": "1", "SERVERS_FALL_AT_9": "0"}
AT_THE_END = {f"SERVERS_FALL_AT_{VERSIONS - 1}": "10"}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with programs_in(tmp_path_factory.mktemp("run")) as programs:
        programs.script(SCRIPT)
        yield programs


@pytest.fixture(scope="module")
def undisturbed(programs: Programs) -> Program:
    """A run without faults; it writes whole.json and the folder logs."""
    return programs.run(
        "ps-run",
        "--servers",
        2,
        "--workers",
        2,
        "--summary",
        "whole.json",
        "--log-dir",
        "logs",
        "train.py",
    )


def summary(programs: Programs, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((programs.folder / name).read_text())
    return found


def test_the_summary_describes_the_run(programs: Programs, undisturbed: Program) -> None:
    assert undisturbed.wait() == 0, undisturbed.output
    content = summary(programs, "whole.json")

    assert content.pop("seconds") > 0
    assert len(bytes.fromhex(content["weights_sha256"])) == 32
    assert content.pop("weights_sha256") in undisturbed.out
    metrics = content.pop("metrics")
    assert metrics["lr"] == pytest.approx(0.05 * 0.9**VERSIONS)
    assert 0 < metrics["loss"] < 5
    assert set(content.pop("history", metrics)) == {"loss", "lr"}
    goodput = content.pop("goodput")
    assert goodput["samples"] == 1
    assert 0 < goodput["seconds"] <= 1
    assert content.pop("this_run") == {
        "steps": 2 * VERSIONS,
        "samples": 320,
        "resumed_version": None,
    }
    assert content == {
        "status": "done",
        "training": "0",
        "trainings_finished": [],
        "steps": 2 * VERSIONS,
        "samples": 320,
        "policy": "sync",
        "staleness": None,
        "servers": 2,
        "workers": 2,
        "restarts": 0,
        "saved": None,
    }


def test_a_finished_run_leaves_no_temporary_files(programs: Programs, undisturbed: Program) -> None:
    assert undisturbed.wait() == 0
    assert list(programs.temporary.iterdir()) == []


def test_log_dir_contains_the_log_of_each_process(programs: Programs, undisturbed: Program) -> None:
    assert undisturbed.wait() == 0
    logs = {path.name: path.read_text() for path in (programs.folder / "logs").iterdir()}

    assert sorted(logs) == ["s0.log", "s1.log", "w0.log", "w1.log"]
    assert "listening" in logs["s1.log"]
    assert "here 1" in logs["w1.log"]
    assert "[w1] here 1" in undisturbed.out


def test_weights_do_not_depend_on_the_number_of_servers(
    programs: Programs, undisturbed: Program
) -> None:
    again = programs.run(
        "ps-run", "--servers", 1, "--workers", 2, "--summary", "again.json", "train.py"
    )

    assert (undisturbed.wait(), again.wait()) == (0, 0), again.output
    assert (
        summary(programs, "again.json")["weights_sha256"]
        == summary(programs, "whole.json")["weights_sha256"]
    )


def test_a_killed_run_resumes_to_the_same_weights(programs: Programs, undisturbed: Program) -> None:
    flags = (
        "--servers",
        2,
        "--workers",
        2,
        "--data-dir",
        "job",
        "--snapshot-every",
        "5steps",
        "--summary",
        "end.json",
    )
    first = programs.start("ps-run", *flags, "train.py", STOP_AT="7")
    first.wait_for("stops at 7", times=2)
    until(
        lambda: SnapshotDirectory(programs.folder / "job").versions() == [5],
        "a snapshot of version 5",
    )

    processes = descendants(first.pid)
    first.send(signal.SIGKILL)
    assert len(processes) in (4, 5)  # a spare server starts after some seconds
    assert all(map(wait_for_exit, processes))
    second = programs.run("ps-run", *flags, "train.py")

    assert second.wait() == 0, second.output
    assert second.out.count("starts at 5") == 2
    assert undisturbed.wait() == 0
    assert (
        summary(programs, "end.json")["weights_sha256"]
        == summary(programs, "whole.json")["weights_sha256"]
    )


def test_allreduce_resumes_to_the_same_weights_after_ctrl_c(programs: Programs) -> None:
    """The workers have the newest weights, and upload them when they are asked to leave."""
    flags = ("--policy", "allreduce", "--servers", 2, "--workers", 2, "--data-dir", "reducing")
    other = ("--data-dir", "reducing-again", "--summary", "reducing-again.json")
    end = ("--summary", "reducing.json")
    first = programs.start("ps-run", *flags, "train.py", STOP_AT="7")
    first.wait_for("stops at 7", times=2)
    first.send(signal.SIGINT)
    assert first.wait() == 130, first.output

    second = programs.run("ps-run", *flags, *end, "train.py")
    undisturbed = programs.run("ps-run", *flags, *other, "train.py")

    assert second.wait() == 0, second.output
    assert second.out.count("starts at 7") == 2
    assert undisturbed.wait() == 0, undisturbed.output
    content = summary(programs, "reducing.json")
    assert (content["policy"], content["samples"]) == ("allreduce", 320)
    expected = summary(programs, "reducing-again.json")["weights_sha256"]
    assert content["weights_sha256"] == expected


@pytest.mark.parametrize("policy", ["sync", "allreduce"])
def test_a_killed_worker_is_restarted_and_each_batch_counts_once(
    programs: Programs, policy: str
) -> None:
    """The worker is killed while it has a batch. Another worker gets that batch; its earlier pushes
    count.
    """
    (programs.folder / "fallen").unlink(missing_ok=True)
    flags = ("--servers", 1, "--workers", 2, "--lease", "1s", "--summary", "killed.json")
    run = programs.run("ps-run", "--policy", policy, *flags, "train.py", FALLS="yes")

    assert run.wait() == 0, run.output
    content = summary(programs, "killed.json")
    assert (content["status"], content["restarts"]) == ("done", 1)
    assert (content["samples"], content["steps"]) == (320, 2 * VERSIONS)
    assert "w1 was killed by SIGKILL; restart 1 of at most 3" in run.err
    assert "worker_lost" in run.err


def test_with_a_log_killed_processes_do_not_change_the_weights(
    programs: Programs, undisturbed: Program
) -> None:
    """Both servers and a worker are killed; ps-run restarts only these three."""
    (programs.folder / "fallen").unlink(missing_ok=True)
    flags = ("--servers", 2, "--workers", 2, "--data-dir", "logged", "--durability", "log")
    wait = ("--on-worker-loss", "wait:60s", "--summary", "fallen.json")
    run = programs.run(
        "ps-run", *flags, *wait, "train.py", FALLS="yes", SERVERS_FALL="SIGKILL", **EARLY
    )

    assert run.wait() == 0, run.output
    for name in ("s0", "s1", "w1"):
        assert f"{name} was killed by SIGKILL; restart " in run.err
    content = summary(programs, "fallen.json")
    assert (content["status"], content["restarts"], content["samples"]) == ("done", 3, 320)
    assert undisturbed.wait() == 0
    assert content["weights_sha256"] == summary(programs, "whole.json")["weights_sha256"]


@pytest.mark.parametrize("when", [EARLY, AT_THE_END], ids=["early", "at the end"])
def test_servers_that_get_sigterm_are_restarted(
    programs: Programs, undisturbed: Program, when: dict[str, str], tmp_path: Path
) -> None:
    """ps-run did not send the signal, and the final weights are not read yet."""
    for shard in (0, 1):
        (programs.folder / f"fallen-{shard}").unlink(missing_ok=True)
    flags = (
        "--servers",
        2,
        "--workers",
        2,
        "--data-dir",
        tmp_path / "data",
        "--durability",
        "log",
        "--summary",
        "ended.json",
    )
    run = programs.run("ps-run", *flags, "train.py", SERVERS_FALL="SIGTERM", **when)

    assert run.wait() == 0, run.output
    for name in (
        ("s0", "s1") if when is EARLY else ()
    ):  # late signals may meet servers that already stop
        assert f"{name} exited with 143: terminated (SIGTERM); restart " in run.err
    assert undisturbed.wait() == 0
    assert (
        summary(programs, "ended.json")["weights_sha256"]
        == summary(programs, "whole.json")["weights_sha256"]
    )
