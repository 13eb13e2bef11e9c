"""Policy allreduce: workers that join late, are asked to leave, or fail."""

import logging
import math
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pscommon.core.errors import InvalidRequestError, PSError
from psworker import Client, Stopping
from psworker.steps.process_groups import ProcessGroups, ReduceFailedError
from psworker.steps.reduced_step import ReducedStep
from tests.support.cluster import Cluster
from tests.support.events import records_of
from tests.support.reducing import BARRIER, Net, Worker
from tests.support.workers import joined, together, until

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


def test_others_do_not_wait_for_the_next_step_of_a_worker_that_voids_a_round(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its computation may be long."""
    servers = cluster(policy="allreduce", min_workers=2)
    first, other = together(*[partial(Worker, servers.address, rank) for rank in range(2)])
    reduce = ProcessGroups.reduce

    def fail(groups: ProcessGroups, *arguments: Any) -> list[Tensor]:
        if groups is first.strategy._groups:
            raise ReduceFailedError("a test")
        return reduce(groups, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ProcessGroups, "reduce", fail)
        assert together(first.step, other.step) == ["stale"] * 2

    assert together(first.step, other.step) == ["applied"] * 2
    together(first.job.close, other.job.close)


def test_a_failed_round_of_weights_is_logged_and_repeated(
    cluster: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    servers = cluster(policy="allreduce")
    first = Worker(servers.address, 0)
    first.steps(1)
    send, failures = ProcessGroups.send, [ReduceFailedError("a test")]

    def fail_once(*arguments: Any) -> None:
        if failures:
            raise failures.pop()
        send(*arguments)

    monkeypatch.setattr(ProcessGroups, "send", fail_once)
    job, model = joined(servers.address, 1), Net()
    waiting = threading.Thread(target=first.job.client.collective, args=(1, BARRIER, 0))
    waiting.start()

    job.optimizer(torch.optim.Adam(model.parameters(), lr=0.5), model)
    job.pull()

    assert model.weight.tolist() == first.weights()
    assert "a test" in str(records_of(caplog, "reduce_round_void"))
    job.client.collective(1, BARRIER, 0)
    waiting.join()
    together(first.job.close, job.close)


def test_another_parameter_in_a_module_is_refused(cluster: Make) -> None:
    """A step would not change it."""
    worker = Worker(cluster(policy="allreduce").address, 0)
    worker.model.weight = torch.nn.Parameter(torch.zeros(3))
    worker.backward()

    with pytest.raises(InvalidRequestError, match="weight is another parameter"):
        worker.optimizer.step()
    worker.job.close("the test is over")


def ask_to_leave(worker: Worker) -> None:
    """Let the time pass that a drained worker waits for others."""
    drain = worker.job.client._connection.drain
    drain.ask()
    drain.begin()
    drain.deadline = -math.inf


def weights_of_servers(servers: Cluster) -> tuple[int, list[float]]:
    with Client(servers.address, observe=True) as observer:
        weights = observer.pull()["weight"].tolist()
        return observer.version, weights


def test_a_worker_that_is_to_leave_in_a_long_step_finishes_and_uploads(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two shards decide a push together, so their answer has to be waited for."""
    servers = cluster(2, policy="allreduce")
    worker = Worker(servers.address, 0)
    worker.steps(3)
    reduce = ProcessGroups.reduce

    def slow(*arguments: Any) -> list[Tensor]:
        ask_to_leave(worker)
        return reduce(*arguments)

    monkeypatch.setattr(ProcessGroups, "reduce", slow)
    assert worker.step() == "applied"
    with pytest.raises(Stopping):
        worker.job.session.check_stopping()
    worker.job.close()

    assert weights_of_servers(servers) == (4, worker.weights())


def test_a_job_that_is_stopped_has_the_newest_weights(
    cluster: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers wait for the upload, which may take longer than a worker needs to leave."""
    servers = cluster(2, policy="allreduce", data_dir=tmp_path, save=tmp_path / "file")
    service = servers.servers[0].service
    assert service is not None
    worker = Worker(servers.address, 0)
    worker.steps(3)
    monkeypatch.setattr("psserver.coordinator.service.FAREWELL_SECONDS", 0.0)

    service.stop("a test")
    until(lambda: worker.job.stopping, "the end of the job")
    with pytest.raises(SystemExit):
        worker.job.session.check_stopping()
    worker.job.close()

    assert servers.servers[0].ended.wait(20)
    assert service.not_saved == ""
    assert load_file(tmp_path / "file")["weight"].tolist() == worker.weights()


def leave_while_waiting(servers: Cluster) -> tuple[Worker, Worker]:
    """Return workers of version 2; the first gave up its third step, as the other made none."""
    first, other = together(*[partial(Worker, servers.address, rank) for rank in range(2)])
    together(partial(first.steps, 2), partial(other.steps, 2))
    reduction = servers.servers[0].service.executor.coordinator.job.reduction  # type: ignore[union-attr]

    def leave() -> None:
        until(lambda: reduction.waiting, "a request that waits")
        ask_to_leave(first)

    def step() -> None:
        first.model.count.fill_(77)
        with pytest.raises(Stopping):
            first.step()

    together(leave, step)
    return first, other


def test_a_worker_that_gives_up_its_step_uploads(cluster: Make) -> None:
    """Its weights, without the buffers of the forward that does not count."""
    servers = cluster(2, policy="allreduce", min_workers=2)

    first, other = leave_while_waiting(servers)

    assert weights_of_servers(servers) == (2, other.weights())
    with Client(servers.address, observe=True) as observer:
        assert observer.pull()["count"].item() == 0
    first.job.close()
    other.job.close()


def test_a_failed_upload_is_logged_and_a_file_has_the_weights(
    cluster: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The servers have the first weights, and this worker has left."""
    servers = cluster(2, policy="allreduce", min_workers=2)

    def fail(_: ReducedStep) -> None:
        raise PSError("a test")

    with monkeypatch.context() as patch:
        patch.setattr(ReducedStep, "_upload", fail)
        first, other = leave_while_waiting(servers)
    first.job.save(tmp_path / "file")

    (record,) = records_of(caplog, "last_changes_not_stored")
    assert "a test" in str(record)
    assert load_file(tmp_path / "file")["weight"].tolist() == other.weights()
    first.job.close()
    other.job.close()


def test_a_worker_without_a_step_uploads_what_it_received(cluster: Make) -> None:
    """The worker that has made the version is lost."""
    servers = cluster(policy="allreduce")
    first, idle = Worker(servers.address, 0), Worker(servers.address, 1)
    waiting = threading.Thread(target=idle.job.client.collective, args=(1, BARRIER, 0))
    waiting.start()
    first.steps(2)
    first.job.client.collective(1, BARRIER, 0)
    waiting.join()
    reduction = servers.servers[0].service.executor.coordinator.job.reduction  # type: ignore[union-attr]

    def send() -> None:
        until(lambda: reduction.waiting, "a request that waits")
        first.strategy._offer()

    together(idle.strategy._offer, send)
    assert idle.strategy._own_version == 2
    with servers.servers[0].service.executor.step() as (recorder, now):  # type: ignore[union-attr]
        recorder.coordinator.registration.lose(first.job.client.worker, "a test", now)

    idle.job.close()

    assert weights_of_servers(servers) == (2, first.weights())
    first.job.close("lost")


def test_a_sparse_gradient_is_refused(cluster: Make) -> None:
    worker = Worker(cluster(policy="allreduce").address, 0)
    worker.model.weight.grad = torch.ones(3).to_sparse()

    with pytest.raises(InvalidRequestError, match="weight has a sparse gradient"):
        worker.optimizer.step()
    worker.job.close("the test is over")


def test_a_refused_upload_is_logged(cluster: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    worker = Worker(cluster(policy="allreduce").address, 0)
    worker.steps(2)
    worker.strategy._own_version = 1

    worker.strategy._upload()

    assert len(records_of(caplog, "upload_refused")) == 1
    worker.job.close("the test is over")
