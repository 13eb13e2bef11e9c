"""ps-run follows the number of workers that the job wants, and no sample is lost."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.programs import Program, Programs, programs_in
from tests.support.workers import until

SAMPLES = 2000

# Each sample moves a weight of its own by one. A worker trains slowly until the file `go` is there.
SCRIPT = """
import os, sys, threading, torch, psworker
samples = int(sys.argv[1])
model = torch.nn.Linear(samples, 1, bias=False)
torch.nn.init.zeros_(model.weight)
with psworker.connect() as job:
    print("trains", job.rank, flush=True)
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    for (sample,) in job.batches((torch.arange(samples),), batch_size=1, epochs=1):
        optimizer.zero_grad()
        (-model.weight[0, sample]).sum().backward()
        optimizer.step()
        if not os.path.exists("go"):
            threading.Event().wait(0.05)
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Programs]:
    """Programs with a registry of jobs of their own, which has the tokens of the run."""
    (tmp_path / "registry").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "registry"))
    with programs_in(tmp_path) as programs:
        programs.script(SCRIPT)
        yield programs


def states(programs: Programs) -> list[str]:
    program = programs.run("ps-ctl", "workers", "--output", "json")
    assert program.wait() == 0, program.output
    return [row["state"] for row in json.loads(program.out) if row["state"] != "left"]


def scale(programs: Programs, workers: int) -> None:
    program = programs.run("ps-ctl", "scale", "workers", workers)
    assert program.wait() == 0, program.output


def scaled_to_four_and_back(programs: Programs, *flags: object) -> Program:
    """Return the run after it has gone from 2 workers to 4, to 2, and to its end."""
    run = programs.start(
        *("ps-run", "--servers", 2, "--workers", 2, "--device", "cpu", "--threads", 1),
        *("--summary", "summary.json", *flags, "train.py", SAMPLES),
    )
    run.wait_for("trains", times=2)
    scale(programs, 4)
    run.wait_for("trains", times=4)
    until(lambda: states(programs) == ["active"] * 4, "four workers")
    scale(programs, 2)
    until(lambda: states(programs) == ["active"] * 2, "two workers")
    (programs.folder / "go").touch()
    assert run.wait() == 0, run.output
    return run


def test_scaling_from_two_to_four_to_two_workers_counts_each_sample_once(
    programs: Programs,
) -> None:
    run = scaled_to_four_and_back(programs, "--policy", "async", "--save", "end.safetensors")

    weights = load_file(programs.folder / "end.safetensors")
    assert torch.equal(weights["weight"], torch.ones(1, SAMPLES))
    summary = json.loads((programs.folder / "summary.json").read_text())
    assert (summary["samples"], summary["restarts"]) == (SAMPLES, 0)
    assert "[run] 4 workers wanted: starting 2 more" in run.err
    assert "[run] 2 workers wanted: w2, w3 leave" in run.err


def test_scaling_under_sync_counts_each_sample_once(programs: Programs) -> None:
    scaled_to_four_and_back(programs, "--policy", "sync")

    summary = json.loads((programs.folder / "summary.json").read_text())
    assert (summary["samples"], summary["steps"]) == (SAMPLES, SAMPLES)
