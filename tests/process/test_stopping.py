"""Scripts with epochs and evaluation that Ctrl-C, SIGTERM, drain or stop ends; the one-call API."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psworker import DistributedTraining
from psworker.ctl.cli import main as ps_ctl
from tests.support.cluster import Cluster
from tests.support.programs import Programs, programs_in
from tests.support.workers import DEADLINE, status, until

Make = Callable[..., Cluster]
DATA = torch.ones(64, 1), torch.zeros(64, 1)

EPOCHS = """
import os, torch, psworker
from torch import nn

def train(model, device, loader, optimizer, epoch):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    print("trained", epoch, flush=True)

def test(model, device, loader, epoch):
    model.eval()
    with torch.no_grad():
        print("evaluated", epoch, flush=True)

def main():
    job = psworker.connect()
    model = nn.Linear(1, 1)
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.001), model)
    data = torch.utils.data.TensorDataset(torch.ones(64, 1), torch.zeros(64, 1))
    loader = job.batches(data, batch_size=4, num_workers=int(os.environ.get("LOADERS", 0)))
    for epoch in range(100_000):
        train(model, job.device, loader, optimizer, epoch)
        test(model, job.device, loader, epoch)
    job.close()

try:
    main()
except Exception as error:
    print("swallowed", error, flush=True)
finally:
    print("finally", flush=True)
"""


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as programs:
        yield programs


@pytest.mark.parametrize("loaders", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_ps_run_ends_scripts_within_an_epoch(
    programs: Programs, number: signal.Signals, loaders: int
) -> None:
    programs.script(EPOCHS)
    flags = ("--servers", 2, "--workers", 2, "--data-dir", "data", "--summary", "summary.json")
    run = programs.start("ps-run", *flags, "train.py", LOADERS=str(loaders))
    run.wait_for("[w0] evaluated 1")

    run.send(number)

    assert run.wait() == 128 + number
    assert run.out.count("evaluated") == run.out.count("trained")
    assert (
        run.out.count("finally"),
        run.out.count("swallowed"),
        run.output.count("Traceback"),
    ) == (
        2,
        0,
        0,
    )
    after = run.err[run.err.index("interrupted by") :]
    assert after.count("snapshot_written") == 1
    assert "[warning]" not in after
    summary = json.loads((programs.folder / "summary.json").read_text())
    assert (summary["status"], summary["error"]["exit_code"]) == ("interrupted", 128 + number)


def test_stop_ends_all_scripts_and_the_run_exits_with_0(programs: Programs) -> None:
    programs.script(EPOCHS)
    run = programs.start("ps-run", "--workers", 2, "train.py")
    run.wait_for("[w1] evaluated 1")
    address = run.wait_for("listening").split("address=")[1].split()[0]

    assert ps_ctl(["--ps", address, "stop", "--yes"]) == 0

    assert run.wait() == 0, run.output
    assert (
        run.output.count("finally"),
        run.output.count("swallowed"),
        run.output.count("Traceback"),
    ) == (2, 0, 0)
    assert run.output.count("script_ended") == 2
    assert "[warning]" not in run.output


SLOW = """
import os, threading, torch, psworker
first = os.environ["PS_WORKER_RANK"] == "0"
job = psworker.connect()
model = torch.nn.Linear(1, 1)
optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
for number, (x,) in enumerate(job.batches((torch.ones(400, 1),), batch_size=4)):
    if number == 2 and not first:
        print("takes its time", flush=True)
        threading.Event().wait()
    model(x).sum().backward()
    optimizer.step()
"""


@pytest.mark.timing
def test_a_worker_that_waits_in_sync_stops_within_two_seconds(
    programs: Programs,
) -> None:
    """It waits for a worker that makes no further call; ps-run kills that one after the grace
    period.
    """
    programs.script(SLOW)
    run = programs.start("ps-run", "--workers", 2, "--grace", "4s", "train.py")
    run.wait_for("takes its time")
    run.wait_for("update_delayed")

    began = time.monotonic()
    run.send(signal.SIGINT)
    run.wait_for("script_ended")

    assert time.monotonic() - began < 2.0 + 1.0  # tolerance for a busy machine
    assert run.wait() == 130
    assert "Traceback" not in run.output


# ---- train_distributed ---------------------------------------------------------------------------


def train_endlessly(address: str) -> dict[str, Any]:
    return DistributedTraining(ps=address).train_distributed(
        nn.Linear(1, 1), DATA, nodes=2, epochs=100_000
    )


@pytest.mark.parametrize("how", ["stop", "drain"])
def test_train_distributed_returns_its_progress_when_stopped(cluster: Make, how: str) -> None:
    """The process of the caller continues."""
    address = cluster(1, min_workers=2).address
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train_endlessly, address)
        until(lambda: status(address)["version"] > 5, "training")
        here = [
            str(row["worker"]) for row in status(address)["workers"] if row["state"] == "active"
        ]
        for command in (
            [["stop", "--yes"]] if how == "stop" else [["drain", worker] for worker in here]
        ):
            assert ps_ctl(["--ps", address, *command]) == 0
        result = training.result(DEADLINE)

    assert result["status"] == "stopped"
    assert result["steps"] > 5
    assert set(result["state_dict"]) == {"weight", "bias"}


def test_train_distributed_is_done_after_one_of_two_workers_is_drained(
    cluster: Make,
) -> None:
    address = cluster(1, min_workers=2).address

    def train() -> dict[str, Any]:
        return DistributedTraining(ps=address).train_distributed(
            nn.Linear(1, 1), DATA, nodes=2, epochs=50, batch_size=4
        )

    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train)
        until(lambda: status(address)["version"] > 5, "training")
        drained = next(
            str(row["worker"]) for row in status(address)["workers"] if row["state"] == "active"
        )
        assert ps_ctl(["--ps", address, "drain", drained]) == 0
        result = training.result(DEADLINE)

    assert (result["status"], result["samples"]) == ("done", 50 * 64)
