"""A script in a trial of a batch size: other batches, a few steps, no files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import psworker
from psworker.session.batch_trial import WARM_UP_COUNT, BatchTrial, TrialOrder

ROWS = 40
STEPS = 6
ALL_STEPS = WARM_UP_COUNT + STEPS


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., psworker.Job]:
    """Return a function that connects in a trial."""
    monkeypatch.setenv("PS_LOCAL", "1")

    def connect(replaces: int = 0, batch_size: int = 0) -> psworker.Job:
        job = psworker.connect()
        order = TrialOrder(str(tmp_path / "result"), STEPS, replaces, batch_size)
        job.session.trial = BatchTrial(order)
        return job

    return connect


def results(job: psworker.Job, tmp_path: Path) -> Any:
    """Return the results as of the end of the process."""
    assert job.session.trial is not None
    job.session.trial.end()
    assert [path.name for path in tmp_path.iterdir()] == ["result"]
    return json.loads((tmp_path / "result").read_text())


def make(job: psworker.Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1, 1)
    return model, job.optimizer(torch.optim.SGD(model.parameters(), lr=0.125), model)


def train(job: psworker.Job, loader: Any, passes: int = 1) -> list[int]:
    """Return the number of rows of each batch."""
    model, optimizer = make(job)
    rows = []
    for _ in range(passes):
        for batch in loader() if callable(loader) else loader:
            rows.append(len(batch))
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return rows


def test_a_trial_measures_with_another_batch_size_and_ends(
    start: Callable[..., psworker.Job], tmp_path: Path
) -> None:
    with start(8, 20) as job, pytest.raises(psworker.Stopping):
        train(job, job.batches(torch.ones(ROWS, 1), batch_size=8))

    # one pass of the script has 2 batches of this size
    found = results(job, tmp_path)
    assert found["samples"] == [20] * STEPS
    assert len(found["seconds"]) == STEPS
    assert min(found["seconds"]) > 0
    assert found["batch_sizes"] == [20]
    assert found["length"] == ROWS
    assert found["steps"] == ALL_STEPS
    assert found["optimizers"] == [["", "sgd", [0.125]]]
    assert found["device"] == "cpu"
    assert found["gpu_memory"] is None
    assert found["memory"] > 10 << 20


def test_the_first_trial_keeps_the_batch_size(
    start: Callable[..., psworker.Job], tmp_path: Path
) -> None:
    with start() as job, pytest.raises(psworker.Stopping):
        train(job, job.batches(torch.ones(ROWS, 1), batch_size=8))

    assert results(job, tmp_path)["batch_sizes"] == [8]


def test_other_loaders_keep_their_batch_size(start: Callable[..., psworker.Job]) -> None:
    with start(8, 20) as job:
        assert job.batches(torch.ones(ROWS, 1), batch_size=10).batch_size == 10
        loader = DataLoader(torch.ones(ROWS, 1), batch_size=8)  # type: ignore[arg-type]
        assert job.batches(loader).batch_size == 20


def test_evaluations_do_not_repeat(start: Callable[..., psworker.Job], tmp_path: Path) -> None:
    with start(8, 20) as job:
        make(job)
        loader = job.batches(torch.ones(ROWS, 1), batch_size=8)
        with torch.no_grad():
            assert sum(len(batch) for batch in loader) == ROWS
        job.session.trial.write()  # type: ignore[union-attr]
    assert results(job, tmp_path)["batch_sizes"] == [], "it was no training pass"


def test_passes_with_a_sampler_are_counted_together(
    start: Callable[..., psworker.Job], tmp_path: Path
) -> None:
    data = torch.ones(ROWS, 1)
    with start(8, 20) as job:
        sampler = SequentialSampler(range(ROWS))
        loader = job.batches(data, batch_size=8, sampler=sampler)
        assert train(job, loader, passes=3) == [20] * 6
    assert results(job, tmp_path)["steps"] == 6, "the script has ended before the trial"

    with start(8, 20) as job, pytest.raises(psworker.Stopping):
        train(job, job.batches(data, batch_size=8, sampler=sampler), passes=9)


def test_a_batch_sampler_is_noticed(start: Callable[..., psworker.Job], tmp_path: Path) -> None:
    sampler = [[0, 1], [2], [3, 4, 5]]
    with start() as job:
        train(job, job.batches(torch.ones(ROWS, 1), batch_sampler=sampler))

    assert results(job, tmp_path)["batch_sizes"] == [0]


def test_a_batch_sampler_of_torch_gets_another_batch_size(
    start: Callable[..., psworker.Job], tmp_path: Path
) -> None:
    data, order = torch.ones(ROWS, 1), SequentialSampler(range(ROWS))
    with start() as job:
        train(job, job.batches(data, batch_sampler=BatchSampler(order, 8, drop_last=False)))
    assert results(job, tmp_path)["batch_sizes"] == [8]

    with start(8, 12) as job:
        sampler = BatchSampler(order, 8, drop_last=True)
        assert train(job, job.batches(data, batch_sampler=sampler)) == [12] * 3


def test_different_batch_sizes_are_noticed(
    start: Callable[..., psworker.Job], tmp_path: Path
) -> None:
    sizes = iter((8, 4, 8, 4))
    with start() as job, pytest.raises(psworker.Stopping):
        train(job, lambda: _two_batches(job, next(sizes)), passes=9)

    assert results(job, tmp_path)["batch_sizes"] == [8, 4]


def _two_batches(job: psworker.Job, size: int) -> Any:
    """Yield as many batches as half a trial has."""
    for number, batch in enumerate(job.batches(torch.ones(ROWS, 1), batch_size=size)):
        if number > ALL_STEPS // 2:
            return
        yield batch


def train_both(
    job: psworker.Job, models: dict[str, nn.Module], optimizers: list[torch.optim.Optimizer]
) -> None:
    for batch in job.batches(torch.ones(ROWS, 1), batch_size=8):
        sum(model(batch) for model in models.values()).sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def test_several_optimizers_make_one_step(
    start: Callable[..., psworker.Job], tmp_path: Path
) -> None:
    models: dict[str, nn.Module] = {name: nn.Linear(1, 1) for name in "dg"}
    with start() as job:
        optimizers = [
            job.optimizer(torch.optim.SGD(models["d"].parameters(), lr=0.5), models["d"], name="d"),
            job.optimizer(
                torch.optim.Adam(models["g"].parameters(), lr=0.25), models["g"], name="g"
            ),
        ]
        with pytest.raises(psworker.Stopping):
            train_both(job, models, optimizers)

    found = results(job, tmp_path)
    assert found["steps"] == ALL_STEPS
    assert found["samples"] == [8] * STEPS
    assert found["optimizers"] == [["d", "sgd", [0.5]], ["g", "adam", [0.25]]]


def test_memory_of_all_gpus_is_measured(
    start: Callable[..., psworker.Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda gpu: (5, 7)[gpu])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    with start() as job:
        make(job)

    found = results(job, tmp_path)
    assert found["gpu_memory"] == 12
    assert found["device"] == "a GPU"


def test_a_trial_saves_no_file(start: Callable[..., psworker.Job], tmp_path: Path) -> None:
    with start() as job:
        make(job)
        job.save(tmp_path / "model.safetensors")
        results(job, tmp_path)


def test_the_job_ends_again_after_the_trial(start: Callable[..., psworker.Job]) -> None:
    with start() as job:
        loader = job.batches(torch.ones(ROWS, 1), batch_size=8)
        with pytest.raises(psworker.Stopping):
            train(job, loader)
        model = job._optimizers.model
        assert model is not None
        optimizer = next(iter(job._optimizers._optimizers.values()))
        batch = torch.ones(8, 1)
        optimizer.param_groups[0]["params"][0].grad = batch[:1]
        with pytest.raises(psworker.Stopping):
            optimizer.step()
