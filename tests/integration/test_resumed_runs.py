"""A second run of a job: permitted changes, errors for others, and a job with nothing left."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import psworker
from pscommon.core.errors import MismatchError
from psworker.session.resume_notice import UNDER_PS_RUN
from tests.support.cluster import Cluster
from tests.support.events import records_of
from tests.support.programs import Programs, programs_in
from tests.support.workers import connected, status

Make = Callable[..., Cluster]
Optimizer = Callable[..., torch.optim.Optimizer]

BATCHES = 4
NOTHING_LEFT = "nothing is left to train"


def script(
    address: str,
    *,
    lr: float = 0.1,
    optimizer: Optimizer = torch.optim.SGD,
    hidden: int = 2,
    samples: int = 8,
    epochs: int = 1,
    calls: int = 1,
    passes: int = 1,
    rank: int = 0,
) -> int:
    """Train on batches of two, in one loop, one per call, or one per pass over a loader; return the
    number of steps.
    """
    with psworker.Job(connected(address, rank), rank) as job:
        model = nn.Linear(hidden, 1)
        made = job.optimizer(optimizer(model.parameters(), lr=lr), model)
        for _ in range(calls):
            loader = job.batches(
                TensorDataset(torch.ones(samples, hidden)), batch_size=2, epochs=epochs
            )
            for _ in range(passes):
                for (x,) in loader:
                    model(x).sum().backward()
                    made.step()
                    made.zero_grad()
        return job.stats.steps


@pytest.fixture(params=["snapshot", "log", "log of killed servers"])
def resumed(
    request: pytest.FixtureRequest, cluster: Make, tmp_path: Path
) -> Callable[..., Cluster]:
    """Return servers that restarted after a run with these arguments."""

    def make(**arguments: int) -> Cluster:
        durability = request.param.split()[0]
        servers = cluster(2, data_dir=tmp_path, durability=durability)
        script(servers.address, **arguments)
        servers.close() if "killed" in request.param else servers.stop()
        return cluster(2, data_dir=tmp_path, durability=durability)

    return make


def changes(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = records_of(caplog, "hyper_parameters_changed")
    return [record.__dict__["changes"] for record in records]


def test_another_learning_rate_is_adopted_and_logged_once(
    resumed: Callable[..., Cluster], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    servers = resumed()
    with connected(servers.address, observe=True) as client:
        before = client.pull()["bias"].item()
    assert script(servers.address, lr=0.01, epochs=2) == BATCHES

    assert changes(caplog) == ["lr 0.1 -> 0.01"]
    with connected(servers.address, observe=True) as client:
        assert client.pull()["bias"].item() == pytest.approx(before - BATCHES * 2 * 0.01, abs=1e-6)


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("first", "second"),
    [({"epochs": 1}, {"epochs": 3}), ({"calls": 1}, {"calls": 3}), ({"passes": 1}, {"passes": 3})],
)
def test_more_epochs_continue_the_training(
    resumed: Callable[..., Cluster],
    first: dict[str, int],
    second: dict[str, int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of one loop, and of a script with a loop, or a pass over its loader, for each epoch."""
    caplog.set_level(logging.INFO)
    servers = resumed(**first)

    assert script(servers.address, **second) == 2 * BATCHES
    found = status(servers.address)
    assert (found["version"], found["steps"]) == (3 * BATCHES, 3 * BATCHES)
    assert found["resumed"] == {"version": BATCHES, "steps": BATCHES, "samples": 2 * BATCHES}
    assert changes(caplog) == []
    assert NOTHING_LEFT not in caplog.text


@pytest.mark.every(4)
@pytest.mark.parametrize("arguments", [{"epochs": 2}, {"calls": 2}, {"passes": 2}])
def test_a_finished_job_is_reported_in_one_line_with_the_options(
    resumed: Callable[..., Cluster], arguments: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    servers = resumed(**arguments)
    for rank in range(2):
        assert script(servers.address, rank=rank, **arguments) == 0

    (line,) = [record.message for record in caplog.records if NOTHING_LEFT in record.message]
    for words in (
        "more epochs",
        "`--resume never`",
        "`--data-dir`",
        "version 8 (8 steps, 16 samples)",
    ):
        assert words in line


def test_under_ps_run_only_ps_run_reports_a_finished_job(
    resumed: Callable[..., Cluster],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    servers = resumed()
    monkeypatch.setenv(UNDER_PS_RUN, "0")
    script(servers.address)

    assert NOTHING_LEFT not in caplog.text


DIFFERENT: dict[str, tuple[dict[str, object], str, str]] = {
    "optimizer": (
        {"optimizer": torch.optim.Adam},
        "MODEL_MISMATCH",
        "optimizer: adam, the job has sgd",
    ),
    "model": (
        {"hidden": 3},
        "MODEL_MISMATCH",
        "weight: float32[1, 3] trainable, the job has float32[1, 2] trainable",
    ),
    "dataset": ({"samples": 10}, "LOOP_MISMATCH", "size is 10 here and 8 there"),
    "fewer epochs": ({"epochs": 1}, "LOOP_MISMATCH", "cannot have fewer epochs than the 2"),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("difference", DIFFERENT)
def test_a_change_that_cannot_be_resumed_is_refused_with_the_folder(
    resumed: Callable[..., Cluster], tmp_path: Path, difference: str
) -> None:
    arguments, reason, words = DIFFERENT[difference]
    servers = resumed(epochs=2)
    with pytest.raises(MismatchError) as caught:
        script(servers.address, **{"epochs": 2, **arguments})  # type: ignore[arg-type]

    text = str(caught.value)
    assert (caught.value.reason, caught.value.exit_code) == (reason, 11)
    assert words in text
    assert f" in {tmp_path}" in text
    assert "`--resume never`" in text
    assert "--shard" not in text


def test_more_epochs_of_a_loop_before_another_one_are_refused(
    resumed: Callable[..., Cluster],
) -> None:
    servers = resumed(calls=2)
    with pytest.raises(MismatchError, match="the last loop") as caught:
        script(servers.address, calls=2, epochs=2)
    assert caught.value.reason == "LOOP_MISMATCH"


# ---- ps-run --------------------------------------------------------------------------------------

SCRIPT = """
import sys, torch, psworker
from torch import nn
from torch.utils.data import TensorDataset
with psworker.connect() as job:
    model = nn.Linear(2, 1)
    optimizer = job.optimizer(getattr(torch.optim, sys.argv[2])(model.parameters(), lr=0.1), model)
    for (x,) in job.batches(TensorDataset(torch.ones(8, 2)), batch_size=2, epochs=int(sys.argv[1])):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as programs:
        programs.script(SCRIPT)
        yield programs


def test_ps_run_shows_the_totals_of_the_job_and_of_the_run(programs: Programs) -> None:
    def run(epochs: int, optimizer: str = "SGD") -> tuple[str, dict[str, object]]:
        arguments = ("--data-dir", "data", "--summary", "s.json", "train.py", epochs, optimizer)
        program = programs.run("ps-run", *arguments)
        content = json.loads((programs.folder / "s.json").read_text())
        expected = 0 if content["status"] == "done" else 11
        assert program.wait() == expected, program.output
        return program.output, content

    logged, content = run(1)
    assert content["this_run"] == {"steps": 4, "samples": 8, "resumed_version": None}
    assert NOTHING_LEFT not in logged

    logged, content = run(1)
    assert logged.count(NOTHING_LEFT) == 1
    assert "[run] nothing is left to train: job " in logged
    assert (content["steps"], content["samples"]) == (4, 8)
    assert content["this_run"] == {"steps": 0, "samples": 0, "resumed_version": 4}

    logged, content = run(3)
    assert NOTHING_LEFT not in logged
    assert (content["steps"], content["this_run"]) == (
        12,
        {"steps": 8, "samples": 16, "resumed_version": 4},
    )

    logged, content = run(3, "Adam")
    assert "not that of the snapshot of version 12 in data:" in logged
    assert "--shard" not in logged
