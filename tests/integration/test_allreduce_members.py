"""Policy allreduce: workers that join late, are asked to leave, or fail."""

import threading
from collections.abc import Callable

import pytest
import torch

from psworker.steps.process_groups import ProcessGroups, ReduceFailedError
from psworker.steps.reduced_step import ReducedStep
from tests.support.cluster import Cluster
from tests.support.reducing import BARRIER, Net, Worker
from tests.support.workers import joined

Make = Callable[..., Cluster]


def test_a_worker_that_comes_later_resumes_its_schedule(cluster: Make) -> None:
    """It begins at the version of the weights that it gets, which no upload has."""
    servers = cluster(policy="allreduce")
    first = Worker(servers.address, 0)
    first.steps(3)
    job, model = joined(servers.address, 1), Net()
    waiting = threading.Thread(target=first.job.client.collective, args=(1, BARRIER, 0))
    waiting.start()
    adam = torch.optim.Adam(model.parameters(), lr=0.5)
    optimizer = job.optimizer(adam, model)
    scheduler = torch.optim.lr_scheduler.StepLR(adam, step_size=1, gamma=0.5)

    job.resume(scheduler)
    job.pull()

    assert (job.first_version, optimizer.first_count, scheduler.last_epoch) == (3, 3, 3)
    assert adam.param_groups[0]["lr"] == 0.5**4
    job.client.collective(1, BARRIER, 0)
    waiting.join()
    first.job.close()
    job.close()


def test_a_worker_that_fails_to_begin_closes_its_store(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[ReducedStep] = []
    monkeypatch.setattr(ReducedStep, "_synchronize", lambda step: 1 / 0)
    monkeypatch.setattr(ReducedStep, "close", lambda step: closed.append(step))
    job, model = joined(cluster(policy="allreduce").address), Net()

    with pytest.raises(ZeroDivisionError):
        job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

    assert len(closed) == 1
    job.close("the test is over")


def test_a_void_round_leaves_no_buffers_of_its_forward(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statistics of a batch count once, when the batch counts."""
    worker = Worker(cluster(policy="allreduce").address, 0)
    worker.steps(1)
    worker.model.mean.fill_(5.0)

    def fail(*_: object) -> None:
        raise ReduceFailedError("a test")

    with monkeypatch.context() as patch:
        patch.setattr(ProcessGroups, "reduce", fail)
        assert worker.step() == "stale"

    assert worker.model.mean.tolist() == [0.0, 0.0]
    worker.steps(1)
    worker.job.close()
