"""The example of docs/evaluation.md, with two workers."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import psworker
from psworker import Job
from psworker.examples import early_stopping
from tests.support.cluster import Cluster
from tests.support.workers import connected, status, together

Make = Callable[..., Cluster]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="all", marks=pytest.mark.full),
        pytest.param(["--one-evaluates"], id="one"),
    ],
)
def test_two_workers_stop_after_the_same_pass_and_keep_the_best_weights(
    cluster: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str]
) -> None:
    address = cluster(2, min_workers=2).address
    file, thread = tmp_path / "best.safetensors", threading.local()
    reported: list[list[float]] = [[], []]

    def connect() -> Job:
        job = Job(connected(address, rank=thread.rank))
        report, losses = job.report, reported[thread.rank]

        def record(**values: float) -> None:
            losses.extend(values.values())
            report(**values)

        job.report = record  # type: ignore[method-assign]
        return job

    def run(rank: int) -> None:
        thread.rank = rank
        early_stopping.main()

    arguments = ["example", "--epochs", "20", "--patience", "2", "--save", str(file), *options]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(psworker, "connect", connect)
    together(lambda: run(0), lambda: run(1))

    assert reported[0] == reported[1]
    *losses, best = reported[0]
    assert best == min(losses)
    assert len(losses) < 20
    assert losses[-3:].index(best) == 0
    assert status(address)["version"] == len(losses) * 15  # 29 batches a pass
    model = early_stopping.make_model()
    model.load_state_dict(load_file(file))
    loss, _ = early_stopping.evaluate(model, [early_stopping.load()[1]])
    assert loss == pytest.approx(best, rel=1e-5)


def test_an_evaluation_brings_newer_weights_unless_the_script_has_loaded_some(
    cluster: Make,
) -> None:
    address = cluster(2, policy="async", min_workers=2).address

    def worker(rank: int) -> list[float]:
        with Job(connected(address, rank), rank) as job:
            model = nn.Linear(1, 1, bias=False)
            nn.init.constant_(model.weight, 4.0)
            optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
            seen = []
            for loads in (False, True):
                job.barrier()
                if rank == 0 and loads:
                    model.load_state_dict({"weight": torch.full((1, 1), 9.0)})
                if rank == 1:
                    model.weight.sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                job.barrier()
                seen.append(float(model.weight.detach()))
            job.pull()
            return [*seen, float(model.weight.detach())]

    assert together(lambda: worker(0), lambda: worker(1)) == [[3.0, 9.0, 2.0], [3.0, 2.0, 2.0]]
