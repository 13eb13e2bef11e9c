"""Policy allreduce: what servers and workers have of weights, optimizer state and buffers."""

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pscommon.core.errors import NonFiniteError
from pscommon.settings.values import SnapshotEvery
from psserver.shard.engine import ShardEngine
from psworker import Client, Job
from psworker.steps.reduced_step import ReducedStep
from tests.support.cluster import Cluster
from tests.support.events import records_of
from tests.support.ports import free_ports
from tests.support.reducing import BARRIER, Net, Worker
from tests.support.training_threads import real
from tests.support.workers import joined, together, until

Make = Callable[..., Cluster]


def engine(servers: Cluster, shard: int = 0) -> ShardEngine:
    return servers.servers[shard].engine


def weights_version(servers: Cluster) -> int:
    return engine(servers).live.machine.weights_version


def state_of(servers: Cluster) -> dict[str, list[float]]:
    store = engine(servers).live.require_store()
    found = {key.partition("@"): value.tolist()[:3] for key, value in store.tensors()}
    return {kind: values for (kind, _, start), values in found.items() if start == "0"}


def test_a_pull_has_the_version_of_its_weights(cluster: Make) -> None:
    """That of the newest upload, not the job's."""
    servers = cluster(policy="allreduce")
    worker = Worker(servers.address, 0)
    initial = worker.weights()
    worker.steps(3)

    with Client(servers.address, observe=True) as observer:
        assert observer.pull()["weight"].tolist() == initial
        assert (observer.version, worker.job.version) == (0, 3)

    worker.job.close()
    with Client(servers.address, observe=True) as observer:
        assert observer.pull()["weight"].tolist() == worker.weights()
        assert observer.version == 3


def test_a_saved_file_needs_no_upload(cluster: Make, tmp_path: Path) -> None:
    """It has the newest weights, from any worker, also one that did not take part in a step."""
    servers = cluster(policy="allreduce")
    first, idle = Worker(servers.address, 0), Worker(servers.address, 1)
    waiting = threading.Thread(target=idle.job.client.collective, args=(1, BARRIER, 0))
    waiting.start()
    first.steps(2)
    first.job.client.collective(1, BARRIER, 0)
    waiting.join()

    def save(worker: Worker, name: str) -> None:
        (tmp_path / name).mkdir()
        worker.job.save(tmp_path / name / "file")
        worker.job.client.collective(2, BARRIER, 0)  # a worker that waits offers its weights

    together(partial(save, idle, "idle"), partial(save, first, "first"))

    for name in ("idle", "first"):
        assert load_file(tmp_path / name / "file")["weight"].tolist() == first.weights()
    assert idle.weights() != first.weights()
    assert weights_version(servers) == 0
    together(first.job.close, idle.job.close)


def test_a_saved_file_of_a_worker_that_left_the_rounds(cluster: Make, tmp_path: Path) -> None:
    servers = cluster(policy="allreduce")
    worker = Worker(servers.address, 0)
    worker.steps(2)
    worker.job.client.drain()
    with pytest.raises(SystemExit):
        worker.job.session.check_stopping()

    worker.job.save(tmp_path / "file")

    assert load_file(tmp_path / "file")["weight"].tolist() == worker.weights()
    worker.job.close()


def test_uploads_of_two_workers_at_one_version_do_not_mix(cluster: Make) -> None:
    servers = cluster(policy="allreduce", min_workers=2)
    made = together(*[partial(Worker, servers.address, rank) for rank in range(2)])
    together(*[partial(each.steps, 3) for each in made])

    for _ in range(20):
        together(*[each.strategy._upload for each in made])
        state = state_of(servers)
        assert state["weight"] == made[0].weights()
        assert all(value > 0 for kind in ("exp_avg", "exp_avg_sq") for value in state[kind])
    together(*[each.job.close for each in made])


def test_an_upload_of_an_older_version_is_not_used(cluster: Make) -> None:
    servers = cluster(policy="allreduce")
    worker = Worker(servers.address, 0)
    worker.steps(2)
    worker.strategy._upload()
    before = state_of(servers)

    worker.strategy._own_version = 1
    worker.strategy._adapter.weights.host.zero_()
    worker.strategy._upload()

    assert (state_of(servers), weights_version(servers)) == (before, 2)
    worker.job.close("the test is over")


def test_a_gradient_of_older_weights_does_not_count(cluster: Make) -> None:
    """Newer weights have come while the script computed: another thread asked for data."""
    servers = cluster(policy="allreduce")
    late, other = Worker(servers.address, 1), Worker(servers.address, 0)
    late.backward()
    waiting = threading.Thread(target=late.job.client.collective, args=(1, BARRIER, 0))
    waiting.start()
    other.steps(2)
    other.job.client.collective(1, BARRIER, 0)
    waiting.join()

    def receive() -> None:
        late.strategy._offer()
        late.job.client.collective(2, BARRIER, 0)

    together(partial(other.job.client.collective, 2, BARRIER, 0), receive)

    late.optimizer.step()

    assert late.optimizer.result is not None
    assert late.optimizer.result.status == "stale"
    assert late.weights() == other.weights()
    assert late.job.version == 2
    late.optimizer.zero_grad()
    assert together(late.step, other.step) == ["applied"] * 2
    assert late.weights() == other.weights()
    together(late.job.close, other.job.close)


def buffers_after_a_step(cluster: Make, policy: str) -> Sequence[dict[str, Tensor]]:
    def script(job: Job) -> dict[str, Tensor]:
        model = Net()
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        job.pull()
        model.mean.copy_(torch.tensor([job.rank + 1.0, 0.1]))
        model.count.fill_((1 << 53) + 1 + job.rank)
        model.weight.grad = torch.ones(3)
        optimizer.step(samples=1 + 2 * job.rank)
        return {name: value.clone() for name, value in model.state_dict().items()}

    return real(cluster(policy=policy, min_workers=2).address, 2, script)


def test_buffers_are_those_of_sync_to_the_last_bit(cluster: Make) -> None:
    """An integer above 2**53 is that of the first worker; an infinity in all parts stays."""
    found = buffers_after_a_step(cluster, "allreduce")
    expected = buffers_after_a_step(cluster, "sync")[0]

    assert expected["count"].item() == (1 << 53) + 1
    for each in found:
        for name in ("mean", "count", "mask"):
            assert torch.equal(each[name], expected[name]), name


def test_a_buffer_with_nan_is_refused(cluster: Make) -> None:
    worker = Worker(cluster(policy="allreduce").address, 0)
    worker.model.mean[1] = float("nan")
    worker.backward()

    with pytest.raises(NonFiniteError, match="mean"):
        worker.optimizer.step()
    worker.model.mean[1] = 0.0
    worker.job.close()


def test_others_go_on_without_a_worker_whose_gradient_has_nan(cluster: Make) -> None:
    servers = cluster(policy="allreduce", min_workers=2)
    bad, good = together(*[partial(Worker, servers.address, rank) for rank in range(2)])

    def fail() -> None:
        bad.model.weight.grad = torch.tensor([1.0, float("nan"), 1.0])
        with pytest.raises(NonFiniteError, match="the gradient of weight has NaN or Inf"):
            bad.optimizer.step()
        bad.job.close("a bad gradient")

    def go_on() -> None:
        while good.step() != "applied":
            pass

    together(fail, go_on)

    assert good.job.version == 1
    assert good.weights() == pytest.approx([0.5] * 3)
    good.job.close()


@pytest.mark.parametrize("policy", ["allreduce", "sync"])
def test_a_buffer_that_changes_after_the_last_step_is_stored(cluster: Make, policy: str) -> None:
    """As that of an averaged teacher; the servers have this version's weights already, or not."""
    servers = cluster(policy=policy)
    job, model = joined(servers.address, 0), Net()
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
    model.weight.grad = torch.ones(3)
    optimizer.step()
    for value in (7, 8):
        model.count.fill_(value)
        job.session.store_buffers()
        with Client(servers.address, observe=True) as observer:
            assert observer.pull()["count"].item() == value
    model.count.fill_(9)
    job.close()

    with Client(servers.address, observe=True) as observer:
        found = observer.pull()
    assert found["count"].item() == 9
    assert found["weight"].tolist() == [0.5] * 3


def test_other_hyper_parameters_than_the_first_worker_has_are_reported(
    cluster: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """The values of the worker that joined first count for all."""
    caplog.set_level(logging.WARNING)
    address = cluster(policy="allreduce").address
    first, late = Worker(address, 1), Worker(address, 0)
    late.optimizer.param_groups[0]["lr"] = 0.25

    together(first.step, late.step)

    assert len(records_of(caplog, "hyper_parameters_differ")) == 1
    assert first.weights() == late.weights() == pytest.approx([0.5] * 3)
    together(first.job.close, late.job.close)


def test_workers_rejoin_when_all_have_lost_their_leases(cluster: Make) -> None:
    """They have the newest weights, which the servers lack."""
    servers = cluster(policy="allreduce", min_workers=2)
    made = together(*[partial(Worker, servers.address, rank) for rank in range(2)])
    together(*[partial(each.steps, 2) for each in made])
    executor = servers.servers[0].service.executor  # type: ignore[union-attr]
    for each in made:
        with executor.step() as (recorder, now):
            recorder.coordinator.registration.lose(each.job.client.worker, "a test", now)

    def go_on(worker: Worker) -> None:
        while worker.step() != "applied":
            pass

    together(*[partial(go_on, each) for each in made])

    assert executor.coordinator.job.failure is None
    assert made[0].weights() == made[1].weights()
    together(*[each.job.close for each in made])


def test_a_restart_of_the_servers_rolls_back_to_the_snapshot(cluster: Make, tmp_path: Path) -> None:
    """Workers that live on take its weights and its state, in another process group."""
    bind = f"127.0.0.1:{free_ports(1)[0]}"
    settings: dict[str, Any] = {
        "policy": "allreduce",
        "data_dir": tmp_path,
        "bind": bind,
        "snapshot_every": SnapshotEvery(steps=2),
    }
    servers = cluster(**settings, min_workers=2)
    made = together(*[partial(Worker, servers.address, rank) for rank in range(2)])
    together(*[partial(each.steps, 5) for each in made])
    before = made[0].strategy._groups._number
    until(lambda: not servers.servers[0].service.executor.coordinator.cuts.busy, "a snapshot")
    servers.close()
    again = cluster(**settings)

    first, second = made
    while (first.job.version, first.strategy._generation) != (5, 2):
        first.step(-1.0)  # alone it makes another version 5 than the second worker has
    has_stepped = threading.Event()
    found, expected = dict[int, list[float]](), dict[int, list[float]]()
    membership = again.servers[0].service.executor.coordinator.membership  # type: ignore[union-attr]

    def run_first() -> None:
        until(lambda: len(membership.registered()) == 2, "the second worker")
        while not has_stepped.is_set():
            first.step()
            found[first.job.version] = first.weights()
        first.job.barrier()
        first.job.close()  # a worker that waits for weights then gets them from the servers

    def run_second() -> None:
        while second.step() != "applied":
            pass
        expected[second.job.version] = second.weights()
        has_stepped.set()
        second.job.barrier()
        second.job.close()

    together(run_first, run_second)

    assert first.job.version == second.job.version >= 6
    assert expected.items() <= found.items()
    assert made[0].weights() == made[1].weights()
    assert made[0].strategy._groups._number != before
    assert state_of(again)["weight"] == made[0].weights()


def test_a_worker_that_left_before_a_rollback_saves_the_weights_of_the_servers(
    cluster: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own have a higher version, of updates that the job has lost."""
    settings: dict[str, Any] = {
        "policy": "allreduce",
        "data_dir": tmp_path,
        "bind": f"127.0.0.1:{free_ports(1)[0]}",
        "snapshot_every": SnapshotEvery(steps=2),
    }
    servers = cluster(**settings)
    worker = Worker(servers.address, 0)
    worker.steps(2)
    expected = worker.weights()
    worker.steps(1)
    until(lambda: not servers.servers[0].service.executor.coordinator.cuts.busy, "a snapshot")
    with monkeypatch.context() as patch:
        patch.setattr(ReducedStep, "_upload", lambda step: None)
        worker.job.client.drain()
        with pytest.raises(SystemExit):
            worker.job.session.check_stopping()
    servers.close()
    again = cluster(**settings)
    assert weights_version(again) == 2

    worker.job.save(tmp_path / "file")

    assert load_file(tmp_path / "file")["weight"].tolist() == expected
    worker.job.close("the test is over")


def test_a_snapshot_on_request_has_the_next_weights(cluster: Make, tmp_path: Path) -> None:
    """It waits for a step, before which the first worker uploads."""
    servers = cluster(policy="allreduce", data_dir=tmp_path)
    service = servers.servers[0].service
    assert service is not None
    worker = Worker(servers.address, 0)
    worker.steps(3)

    saved, status = together(partial(service.snapshot_scheduler.save, 20.0), worker.step)

    assert saved in (3, 4)
    assert status == "applied"
    assert weights_version(servers) == saved
    worker.job.close()


def test_a_job_that_ends_without_its_newest_weights_says_so(cluster: Make, tmp_path: Path) -> None:
    """They are lost with the workers that had them."""
    servers = cluster(policy="allreduce", data_dir=tmp_path, save=tmp_path / "file")
    service = servers.servers[0].service
    assert service is not None
    worker = Worker(servers.address, 0)
    worker.steps(3)
    with service.executor.step() as (recorder, now):
        recorder.coordinator.registration.lose(worker.job.client.worker, "a test", now)

    service.stop("a test")

    assert servers.servers[0].ended.wait(20)
    assert "the weights of version 3 are lost" in service.not_saved
    assert "the servers have version 0" in service.not_saved
