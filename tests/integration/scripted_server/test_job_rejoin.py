"""A fenced Job rejoins by itself: the open push is stale, everything is pulled, the loop
continues.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from pscommon.core.errors import FencedError, MismatchError, QuarantinedError
from psworker.client.client import Client
from psworker.job import Job
from psworker.optim.optimizer import ServerOptimizer
from tests.support.fake_server import FakeCluster

DATA = torch.arange(12.0).reshape(12, 1)
Step = Callable[[int], None]
OPTIONS = [{}, {"overlap": True}, {"pipeline": True}]
NAMES = ["whole", "overlap", "pipeline"]


def _do_nothing(step: int = 0) -> None:
    """Ignore the event."""


class Net(nn.Module):
    """A frozen layer, a trained one, and a buffer that counts forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 3), nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(1))
        for tensor in self.first.parameters():
            tensor.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        result: torch.Tensor = self.last(self.first(x))
        return result


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(shards=2) as cluster:
        yield cluster


@contextmanager
def started(cluster: FakeCluster, **options: Any) -> Iterator[tuple[Job, Net, ServerOptimizer]]:
    torch.manual_seed(0)
    net = Net()
    with Job(Client(cluster.addresses, connect_timeout=20.0, wait_timeout=20.0)) as job:
        sgd = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.5)
        yield job, net, job.optimizer(sgd, net, **options)


def backward(net: nn.Module, batch: Any) -> None:
    net(batch[0] if isinstance(batch, (tuple, list)) else batch).sum().backward()


def run(
    job: Job, net: nn.Module, optimizer: ServerOptimizer, each: Step = _do_nothing, **loader: Any
) -> list[str]:
    """Run a loop of batches of one; return how each step ended. each: called before a step, with
    its number from 0.
    """
    results = []
    for step, batch in enumerate(job.batches((DATA,), 1, **loader)):
        each(step)
        backward(net, batch)
        optimizer.step()
        optimizer.zero_grad()
        results.append(optimizer.result.status if optimizer.result else "")
    return results


def committed(cluster: FakeCluster) -> list[tuple[int, int, int]]:
    """Return worker, seq and batch of all pushes that arrived completely at some shard."""
    found = [
        (h.worker, h.seq, h.batches[0].number) for h in cluster.received if h.seq and h.batches
    ]
    return sorted(set(found))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def fence_at(cluster: FakeCluster, when: int) -> Callable[[int], None]:
    return lambda step: cluster.fence(1) if step == when else None


@pytest.mark.parametrize("options", OPTIONS[:2], ids=NAMES[:2])
def test_a_step_of_a_fenced_worker_is_stale_and_the_loop_continues(
    cluster: FakeCluster, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    cluster.deal(0, 1, 2, None)
    with started(cluster, **options) as (job, net, optimizer):
        results = run(job, net, optimizer, fence_at(cluster, 1))

        assert results == ["applied", "stale", "applied"]
        assert job.client.worker == 2
        assert job.stats.stale == 1
    assert cluster.counted == [(1, 1), (2, 1)]
    assert cluster.returned == []  # the fence has already returned batch 1
    (text,) = warnings(caplog)
    assert text == (
        "rejoin_started worker=1 job=job-1 "
        "reason=worker 1 is no longer a member of the job: its lease ended"
    )


def test_in_a_pipeline_a_fence_loses_the_open_push_and_the_current_one(
    cluster: FakeCluster,
) -> None:
    cluster.policy = "async"
    cluster.deal(0, 1, 2, 3, None)
    with started(cluster, pipeline=True) as (job, net, optimizer):
        cluster.before[0].extend([_do_nothing, fenced])  # fences during the second push

        run(job, net, optimizer)
        job.wait()

        assert (job.client.worker, job.stats.stale) == (2, 2)
    assert cluster.counted == [(1, 1), (2, 1)]
    # batch 1 may have reached the other shard
    assert {batch for _, _, batch in committed(cluster)} - {1} == {0, 3}
    assert cluster.returned == []


def test_in_a_pipeline_a_push_that_ends_before_the_fence_counts(
    cluster: FakeCluster,
) -> None:
    cluster.policy = "async"
    cluster.deal(0, 1, None)
    with started(cluster, pipeline=True) as (job, net, optimizer):
        run(job, net, optimizer, lambda step: cluster.control["NextBatch"].append(fenced))

        assert job.stats.stale == 0
    assert cluster.counted == [(1, 1), (2, 1)]


def test_the_step_reports_the_rejoin(cluster: FakeCluster) -> None:
    with started(cluster) as (job, net, optimizer):
        cluster.fence(1)
        backward(net, DATA)
        optimizer.step()

        assert job.last is not None
        assert (job.last.status, job.last.reason) == (
            "stale",
            "FENCED: worker 1 is no longer a member of the job: its lease ended",
        )


def test_the_whole_state_of_the_servers_is_in_the_model_afterwards(cluster: FakeCluster) -> None:
    """Frozen tensors and buffers too: the servers may have rolled back."""
    with started(cluster) as (job, net, _optimizer):
        before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        with torch.no_grad():
            for tensor in (*net.parameters(), net.seen):
                tensor.add_(1)
        cluster.fence(1)

        job.pull()

        assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
        assert job.client.worker == 2


def test_each_push_has_hyper_parameters(cluster: FakeCluster) -> None:
    with started(cluster) as (job, net, optimizer):
        for _ in range(2):
            backward(net, DATA)
            optimizer.step()
        cluster.fence(1)
        job.pull()
        backward(net, DATA)
        optimizer.step()

    has_groups = {(h.worker, h.seq): bool(h.groups_json) for h in cluster.received if h.seq}
    assert has_groups == {(1, 1): True, (1, 2): True, (2, 1): True}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_fence_during_a_data_request_loses_nothing(cluster: FakeCluster, workers: int) -> None:
    cluster.deal(0, 1, None)
    cluster.control["NextBatch"].extend([_do_nothing, lambda: cluster.fence(1)])
    with started(cluster) as (job, net, optimizer):
        results = run(job, net, optimizer, num_workers=workers)

    assert set(results) <= {"applied", "stale"}
    assert [batch for _, _, batch in committed(cluster)][-1] == 1
    assert cluster.counted[-1][0] == 2


@pytest.mark.full
def test_batches_prefetched_before_the_fence_are_skipped(cluster: FakeCluster) -> None:
    """A batch that the new worker has leased again is used once."""
    cluster.deal(0, 1, 2, 3, 2, 3, None)
    with started(cluster) as (job, net, optimizer):
        seen = []
        loop = job.batches((DATA,), 1, shuffle=False, num_workers=1, prefetch_factor=3)
        for step, (x,) in enumerate(loop):
            seen.append(int(x.item()))
            if step == 0:
                cluster.fence(1)
            backward(net, x)
            optimizer.step()

    assert seen == [0, 2, 3]
    assert cluster.counted == [(2, 1), (2, 2)]


def test_gradients_across_the_fence_are_void_and_new_batches_are_returned(
    cluster: FakeCluster,
) -> None:
    """Otherwise the first half would count twice: its batch belongs to another worker now."""
    cluster.deal(0, 1, 2, None)
    with started(cluster) as (job, net, optimizer):
        results = []
        for step, batch in enumerate(job.batches((DATA,), 1)):
            backward(net, batch)
            if step == 0:
                cluster.fence(1)
            else:
                optimizer.step()
                results.append(optimizer.result.status if optimizer.result else "")

    assert results == ["stale", "applied"]
    assert cluster.returned == [(0, 1)]
    assert committed(cluster) == [(2, 1, 2)]


def test_weights_that_do_not_arrive_are_pulled_during_forward(
    cluster: FakeCluster,
) -> None:
    """The gradients are void: some modules have used other weights than the rest."""
    decided = threading.Event()

    def breaks(frame: int) -> None:
        assert decided.wait(10)
        end_membership(cluster)

    with started(cluster, overlap=True) as (job, net, optimizer):
        backward(net, DATA)
        cluster.outgoing[0] = breaks
        optimizer.step()
        decided.set()
        assert job.last is not None
        assert job.last.status == "applied"

        results = []
        for _ in range(2):
            backward(net, DATA)
            optimizer.step()
            results.append(optimizer.result and optimizer.result.status)

        assert results == ["stale", "applied"]
        assert job.client.worker == 2
    assert [worker for worker, _ in cluster.counted] == [1, 2]


def test_an_evaluation_uses_the_current_weights_of_the_job(cluster: FakeCluster) -> None:
    with started(cluster, overlap=True) as (job, net, optimizer):
        backward(net, DATA)
        cluster.outgoing[0] = lambda frame: end_membership(cluster)
        optimizer.step()
        with torch.no_grad():
            net(DATA)

        assert job.client.worker == 2
        assert torch.equal(net.last.bias, torch.from_numpy(cluster.tensor("last.bias")))


def fenced() -> None:
    raise FencedError("out, amid all this")


def end_membership(cluster: FakeCluster) -> None:
    """Fence worker 1 while weights travel to it: also a repeated request is refused then."""
    cluster.outgoing.clear()
    cluster.fence(1)
    fenced()


def test_a_loop_that_was_rolled_back_requires_a_restart_of_the_script(
    cluster: FakeCluster,
) -> None:
    cluster.deal(0, None, 5, None)
    cluster.open_loop = 1
    with started(cluster) as (job, net, optimizer):
        run(job, net, optimizer)
        with cluster.changed:
            cluster.open_loop, cluster.version = 0, 0

        with pytest.raises(
            FencedError, match="rolled back to version 0, in an earlier loop"
        ) as caught:
            run(job, net, optimizer, fence_at(cluster, 0))

        assert caught.value.exit_code == 20


@pytest.mark.parametrize("back_to", [0, 1])
def test_lost_steps_of_an_abandoned_loop_are_reported(cluster: FakeCluster, back_to: int) -> None:
    """No worker would repeat them. Up to the point where it was left nothing is missing."""
    cluster.deal(0, 1, 5, 6, None)
    with started(cluster) as (job, net, optimizer):
        for _ in job.batches((DATA,), 1):
            backward(net, DATA)
            optimizer.step()
            break
        with cluster.changed:
            cluster.version = back_to

        if back_to:
            assert run(job, net, optimizer, fence_at(cluster, 0))[0] == "stale"
        else:
            with pytest.raises(FencedError, match="rolled back to version 0, in an earlier loop"):
                run(job, net, optimizer, fence_at(cluster, 0))


def test_a_loop_that_the_servers_have_completed_does_not_stop_the_script(
    cluster: FakeCluster,
) -> None:
    cluster.deal(0, None, 5, 6, None)
    cluster.open_loop = 1
    with started(cluster) as (job, net, optimizer):
        run(job, net, optimizer)

        assert run(job, net, optimizer, fence_at(cluster, 0)) == ["stale", "applied"]


def test_an_evaluation_loop_loses_nothing(cluster: FakeCluster) -> None:
    """Its batches count with no push, so the servers never see its end while this worker holds
    them.
    """
    cluster.deal(0, None)
    with started(cluster) as (job, net, _optimizer):
        with torch.no_grad():
            for batch in job.batches((DATA,), 1):
                net(batch[0])
        cluster.fence(1)

        job.report(accuracy=0.5)

    assert cluster.metrics == {"accuracy": 0.5}


@pytest.mark.parametrize(
    "error",
    [QuarantinedError("3 bad gradients in a row"), MismatchError("another job", "JOB_MISMATCH")],
)
def test_an_unrecoverable_error_is_raised(cluster: FakeCluster, error: Exception) -> None:
    def hook() -> None:
        raise error

    with started(cluster) as (_job, net, optimizer):
        cluster.before[0].append(hook)
        backward(net, DATA)
        with pytest.raises(type(error)):
            optimizer.step()

        assert len(cluster.joins) == 1


def test_rejoins_are_limited(cluster: FakeCluster) -> None:
    """A job that fences a worker each time has a reason."""
    with started(cluster) as (_job, net, optimizer):
        cluster.fenced.update(range(1, 20))
        backward(net, DATA)
        with pytest.raises(FencedError):
            optimizer.step()

        assert len(cluster.joins) == 6


def test_a_fence_before_registration_is_handled(cluster: FakeCluster) -> None:
    cluster.control["Register"].append(lambda: cluster.fence(1))
    with started(cluster) as (_job, net, optimizer):
        backward(net, DATA)
        optimizer.step()

    assert cluster.counted == [(2, 1)]


def test_reports_are_sent_after_the_rejoin(cluster: FakeCluster) -> None:
    with started(cluster) as (job, _net, _optimizer):
        cluster.fence(1)
        job.report(accuracy=0.5)

    assert cluster.metrics == {"accuracy": 0.5}
