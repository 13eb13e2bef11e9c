"""The names of the trainings that a process connects to."""

import pytest
import torch
from torch import nn

import psworker
from psworker import InvalidRequestError, Job, TrainingOver


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_LOCAL", "1")


def test_trainings_are_counted() -> None:
    names = []
    for _ in range(3):
        with psworker.connect() as job:
            names.append(job.training)
    with psworker.connect(training="last") as job:
        names.append(job.training)
    with psworker.connect() as job:
        names.append(job.training)
    assert names == ["0", "1", "2", "last", "4"]


def test_a_second_connect_while_the_first_is_open_is_refused() -> None:
    job = psworker.connect()
    with pytest.raises(InvalidRequestError, match=r"job\.close"):
        psworker.connect()
    job.close()
    assert psworker.connect().training == "1"


def test_a_deleted_job_is_not_open() -> None:
    job: Job | None = psworker.connect()
    assert job is not None
    del job
    psworker.connect().close()


def test_a_local_training_is_over_after_its_first_connect() -> None:
    psworker.connect(training="a").close()
    with pytest.raises(TrainingOver):
        psworker.connect(training="a")
    assert psworker.connect().training == "2", "the script's third training"


@pytest.mark.parametrize("name", ["", "x" * 300, 7])
def test_invalid_names_are_refused(name: object) -> None:
    with pytest.raises(InvalidRequestError, match="training="):
        psworker.connect(training=name)  # type: ignore[arg-type]


def test_local_trainings_have_weights_of_their_own() -> None:
    for start in (1.0, 5.0):
        model = nn.Linear(1, 1)
        nn.init.constant_(model.weight, start)
        with psworker.connect() as job:
            optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
            model.weight.sum().backward()
            optimizer.step()
        assert model.weight.item() == start - 0.5
