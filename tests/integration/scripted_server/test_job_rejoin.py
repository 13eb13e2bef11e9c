"""A Job whose place is lost comes back by itself: what was on its way is stale, all is pulled,
the loop goes on.
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


def _nothing(step: int = 0) -> None:
    """Goes on."""


class Net(nn.Module):
    """A frozen layer, one that trains, a buffer that counts forwards."""

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
    job: Job, net: nn.Module, optimizer: ServerOptimizer, each: Step = _nothing, **loader: Any
) -> list[str]:
    """A loop of batches of one; how each step ended. each: called before a step, with its number
    from 0.
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
    """Of all pushes that came whole to some shard: worker, seq, batch."""
    found = [
        (h.worker, h.seq, h.batches[0].number) for h in cluster.received if h.seq and h.batches
    ]
    return sorted(set(found))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def fence_at(cluster: FakeCluster, when: int) -> Callable[[int], None]:
    return lambda step: cluster.fence(1) if step == when else None


@pytest.mark.parametrize("options", OPTIONS[:2], ids=NAMES[:2])
def test_a_step_that_finds_the_place_lost_is_stale_and_the_loop_goes_on(
    cluster: FakeCluster, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    cluster.deal(0, 1, 2, None)
    with started(cluster, **options) as (job, net, optimizer):
        results = run(job, net, optimizer, fence_at(cluster, 1))

        assert results == ["applied", "stale", "applied"]
        assert job.client.worker == 2
        assert job.stats.stale == 1
    assert cluster.counted == [(1, 1), (2, 1)]
    assert cluster.returned == []  # the servers took batch 1 back by themselves
    (text,) = warnings(caplog)
    assert text == (
        "rejoin_started worker=1 job=job-1 "
        "reason=worker 1 is no longer a member of the job: its lease ended"
    )


def test_in_a_pipeline_the_push_on_its_way_is_lost_and_the_one_in_hand(
    cluster: FakeCluster,
) -> None:
    cluster.policy = "async"
    cluster.deal(0, 1, 2, 3, None)
    with started(cluster, pipeline=True) as (job, net, optimizer):
        cluster.before[0].extend([_nothing, fenced])  # the second push

        run(job, net, optimizer)
        job.wait()

        assert (job.client.worker, job.stats.stale) == (2, 2)
    assert cluster.counted == [(1, 1), (2, 1)]
    # 1 may have come to the other shard
    assert {batch for _, _, batch in committed(cluster)} - {1} == {
        0,
        3,
    }
    assert cluster.returned == []


def test_in_a_pipeline_a_push_that_ends_before_the_place_is_lost_counts(
    cluster: FakeCluster,
) -> None:
    cluster.policy = "async"
    cluster.deal(0, 1, None)
    with started(cluster, pipeline=True) as (job, net, optimizer):
        run(job, net, optimizer, lambda step: cluster.control["NextBatch"].append(fenced))

        assert job.stats.stale == 0
    assert cluster.counted == [(1, 1), (2, 1)]


def test_what_the_step_says(cluster: FakeCluster) -> None:
    with started(cluster) as (job, net, optimizer):
        cluster.fence(1)
        backward(net, DATA)
        optimizer.step()

        assert job.last is not None
        assert (job.last.status, job.last.reason) == (
            "stale",
            "FENCED: worker 1 is no longer a member of the job: its lease ended",
        )


def test_all_that_the_servers_have_is_in_the_model_then(cluster: FakeCluster) -> None:
    """Frozen tensors and buffers too: the servers may have gone back to a snapshot."""
    with started(cluster) as (job, net, _optimizer):
        before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        with torch.no_grad():
            for tensor in (*net.parameters(), net.seen):
                tensor.add_(1)
        cluster.fence(1)

        job.pull()

        assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
        assert job.client.worker == 2


def test_hyper_parameters_are_told_again(cluster: FakeCluster) -> None:
    """Servers that went back to a snapshot have those of then."""
    with started(cluster) as (job, net, optimizer):
        for _ in range(2):
            backward(net, DATA)
            optimizer.step()
        cluster.fence(1)
        job.pull()
        backward(net, DATA)
        optimizer.step()

    told = {(h.worker, h.seq): bool(h.groups_json) for h in cluster.received if h.seq}
    assert told == {(1, 1): True, (1, 2): False, (2, 1): True}


@pytest.mark.parametrize("workers", [0, 1])
def test_fenced_when_it_asks_for_data_nothing_is_lost(cluster: FakeCluster, workers: int) -> None:
    cluster.deal(0, 1, None)
    cluster.control["NextBatch"].extend([_nothing, lambda: cluster.fence(1)])
    with started(cluster) as (job, net, optimizer):
        results = run(job, net, optimizer, num_workers=workers)

    assert set(results) <= {"applied", "stale"}
    assert [batch for _, _, batch in committed(cluster)][-1] == 1
    assert cluster.counted[-1][0] == 2


def test_what_the_loader_has_fetched_for_the_old_place_is_passed_over(cluster: FakeCluster) -> None:
    """Unless the new place has leased the very same batch, of which it then gets one."""
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


def test_gradients_of_before_and_after_are_void_and_new_batches_go_back(
    cluster: FakeCluster,
) -> None:
    """Else the first half would count twice: its batch is somebody else's now."""
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


def test_weights_that_do_not_arrive_are_pulled_in_the_midst_of_forward(
    cluster: FakeCluster,
) -> None:
    """Its gradients are void: some modules have used other weights than the rest."""
    decided = threading.Event()

    def breaks(frame: int) -> None:
        cluster.outgoing.clear()
        assert decided.wait(10)
        fenced()

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


def test_a_test_without_gradients_waits_for_the_job_as_it_is_now(cluster: FakeCluster) -> None:
    with started(cluster, overlap=True) as (job, net, optimizer):
        backward(net, DATA)
        cluster.outgoing[0] = lambda frame: (cluster.outgoing.clear(), fenced())[1]
        optimizer.step()
        with torch.no_grad():
            net(DATA)

        assert job.client.worker == 2
        assert torch.equal(net.last.bias, torch.from_numpy(cluster.tensor("last.bias")))


def fenced() -> None:
    raise FencedError("out, amid all this")


def test_a_loop_that_the_servers_have_again_ahead_of_them_needs_the_script_from_its_start(
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
def test_steps_of_a_loop_that_was_broken_off_are_not_lost_without_a_word(
    cluster: FakeCluster, back_to: int
) -> None:
    """Nobody would make them again. Back to where it was left nothing is missing."""
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


def test_a_loop_that_has_ended_on_the_servers_too_is_no_reason_to_stop(
    cluster: FakeCluster,
) -> None:
    cluster.deal(0, None, 5, 6, None)
    cluster.open_loop = 1
    with started(cluster) as (job, net, optimizer):
        run(job, net, optimizer)

        assert run(job, net, optimizer, fence_at(cluster, 0)) == ["stale", "applied"]


def test_a_loop_that_only_tests_has_nothing_that_could_come_again(cluster: FakeCluster) -> None:
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
def test_what_cannot_be_healed_is_raised(cluster: FakeCluster, error: Exception) -> None:
    def hook() -> None:
        raise error

    with started(cluster) as (_job, net, optimizer):
        cluster.before[0].append(hook)
        backward(net, DATA)
        with pytest.raises(type(error)):
            optimizer.step()

        assert len(cluster.joins) == 1


def test_it_does_not_come_back_for_ever(cluster: FakeCluster) -> None:
    """A job that throws it out each time has a reason."""
    with started(cluster) as (_job, net, optimizer):
        cluster.fenced.update(range(1, 20))
        backward(net, DATA)
        with pytest.raises(FencedError):
            optimizer.step()

        assert len(cluster.joins) == 6


def test_the_place_may_be_lost_before_the_model_is_there(cluster: FakeCluster) -> None:
    cluster.control["Register"].append(lambda: cluster.fence(1))
    with started(cluster) as (_job, net, optimizer):
        backward(net, DATA)
        optimizer.step()

    assert cluster.counted == [(2, 1)]


def test_a_report_comes_through(cluster: FakeCluster) -> None:
    with started(cluster) as (job, _net, _optimizer):
        cluster.fence(1)
        job.report(accuracy=0.5)

    assert cluster.metrics == {"accuracy": 0.5}
