"""A drained worker leaves at the next step boundary, loses nothing, and does not wait long."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pscommon.core.data_loop import LoopSpec
from pscommon.core.errors import InvalidRequestError
from pscommon.core.model_spec import OptimizerSettings
from psproto.v1 import coordinator_pb2 as co
from psworker.client.client import Client
from psworker.core.clock import Clock
from psworker.job import Job
from psworker.model.adapter import ModelAdapter
from psworker.model.model_spec import OptimizerMembers
from psworker.optim.optimizer import ServerOptimizer
from psworker.session import drain
from psworker.session.drain import Drain, DrainedError, Stopping
from tests.support.fake_job import lost
from tests.support.fake_server import FakeCluster

ROOT = Path(__file__).parents[3]
SGD = OptimizerSettings("sgd", ({"lr": 0.5},))
ONES = {"w": np.ones(50, np.float32)}
DATA = torch.arange(12.0).reshape(12, 1)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(shards=2, lease=0.1) as cluster:
        yield cluster


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits for others."""
    monkeypatch.setattr(drain, "MAX_WAIT_SECONDS", 0.1)


def connect(cluster: FakeCluster) -> Client:
    client = Client(cluster.addresses, connect_timeout=20.0, wait_timeout=20.0)
    client.register(ONES, SGD)
    return client


@contextmanager
def started(
    cluster: FakeCluster, **options: Any
) -> Iterator[tuple[Job, nn.Linear, ServerOptimizer]]:
    net = nn.Linear(1, 1)
    with Job(Client(cluster.addresses, connect_timeout=20.0, wait_timeout=20.0)) as job:
        yield job, net, job.optimizer(torch.optim.SGD(net.parameters(), lr=0.5), net, **options)


def train(
    job: Job, net: nn.Module, optimizer: ServerOptimizer, each: Callable[[int], object]
) -> list[str]:
    """Train a loop; return how each step ended. each: called before a step, with its
    number from 0.
    """
    results = []
    for step, (x,) in enumerate(job.batches((DATA,), 1)):
        each(step)
        net(x).sum().backward()
        optimizer.step()
        results.append(optimizer.result.status if optimizer.result else "")
    return results


def ask_at(when: int) -> Callable[[int], object]:
    return lambda step: drain.ask_all() if step == when else None


def test_a_drained_worker_waits_for_a_limited_time() -> None:
    now = [100.0]
    asked = Drain(Clock(lambda: now[0], lambda seconds: None))
    now[0] += 1000
    asked.check()
    assert not asked.asked

    asked.ask()
    now[0] += drain.MAX_WAIT_SECONDS - 0.1
    asked.ask()
    asked.check()
    now[0] += 0.1

    with pytest.raises(DrainedError) as caught:
        asked.check()
    assert (caught.value.exit_code, caught.value.reason) == (0, "DRAINED")


def test_only_workers_can_be_drained_and_only_once(cluster: FakeCluster) -> None:
    drain.ask_all()  # clients of earlier tests that are not yet garbage-collected
    with Client(cluster.addresses, observe=True):
        assert not drain.ask_all()
    with Client(cluster.addresses) as client:
        assert drain.ask_all()
        assert client.draining
        assert not drain.ask_all()
    with Client(cluster.addresses):
        pass
    assert not drain.ask_all()


def test_a_heartbeat_carries_the_drain_request(cluster: FakeCluster) -> None:
    with Client(cluster.addresses) as client:
        assert not client.stopping
        cluster.draining.add(1)
        seen = len(cluster.beats)
        cluster.wait_until(lambda: len(cluster.beats) > seen + 2)

        assert (client.stopping, client.draining) == (True, True)


def test_heartbeats_come_at_least_every_second() -> None:
    """Otherwise a long lease would delay the drain of a worker."""
    with FakeCluster(lease=3600) as cluster, Client(cluster.addresses):
        cluster.wait_until(lambda: len(cluster.beats) >= 2, seconds=5)


def test_a_script_that_ignores_the_drain_ends_at_its_second_push(cluster: FakeCluster) -> None:
    def script() -> None:
        with connect(cluster) as client:
            drain.ask_all()
            while True:
                client.push(ONES)

    with pytest.raises(DrainedError, match="has made its last push"):
        script()

    assert cluster.counted == [(1, 1)]
    assert cluster.left == {1: ""}


def test_a_last_push_that_was_refused_can_be_corrected(cluster: FakeCluster) -> None:
    with connect(cluster) as client:
        drain.ask_all()
        with pytest.raises(InvalidRequestError):
            client.push({"unknown": ONES["w"]})
        client.push(ONES)
        with pytest.raises(DrainedError):
            client.push(ONES)

    assert cluster.counted == [(1, 1)]


@pytest.mark.usefixtures("quick")
def test_a_waiting_push_is_abandoned(cluster: FakeCluster) -> None:
    cluster.waits_for = "worker 9"
    with connect(cluster) as client:
        drain.ask_all()
        with pytest.raises(DrainedError, match="asked to leave"):
            client.push(ONES)

        assert max(header.wait_ms for header in cluster.received if header.seq) <= 100


@pytest.mark.usefixtures("quick")
def test_missing_servers_are_not_awaited(cluster: FakeCluster) -> None:
    with connect(cluster) as client:
        cluster.before[0].extend([lost] * 100)
        drain.ask_all()
        with pytest.raises(DrainedError):
            client.pull()


def test_a_long_call_continues_while_the_servers_answer_a_probe(
    cluster: FakeCluster,
) -> None:
    """The second probe is later than the time for which a worker waits for others."""
    with connect(cluster) as client:
        probes = cluster.calls["Describe"] + 2 * len(cluster.addresses)
        cluster.before[0].append(
            lambda: cluster.wait_until(lambda: cluster.calls["Describe"] >= probes)
        )
        drain.ask_all()

        assert list(client.pull()) == ["w"]
        assert list(client.pull()) == ["w"]


KINDS: dict[str, dict[str, Any]] = {"whole": {}, "overlap": {"overlap": True}}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())
def test_a_pass_and_all_later_steps_raise_stopping_after_the_step_in_progress(
    cluster: FakeCluster, options: dict[str, Any]
) -> None:
    """No round waits for the worker meanwhile."""
    cluster.deal(0, 1, 2, 3)

    def script() -> None:
        with started(cluster, **options) as (job, net, optimizer):
            with pytest.raises(Stopping):
                train(job, net, optimizer, ask_at(1))

            assert optimizer.result is not None
            assert (optimizer.result.status, job.stats.steps) == ("applied", 2)
            assert cluster.left == {1: ""}
            with pytest.raises(Stopping):
                optimizer.step()
            job.pull()
            job.report(accuracy=0.5)
            assert cluster.calls["Register"] == 2
            train(job, net, optimizer, lambda step: None)

    with pytest.raises(Stopping, match="asked to leave") as caught:
        script()

    assert caught.value.code == 0
    assert cluster.metrics == {"accuracy": 0.5}
    assert cluster.left == {1: "", 2: ""}
    assert cluster.counted == [(1, 1), (1, 2)]


def test_stopping_the_job_ends_scripts_in_the_same_way(cluster: FakeCluster) -> None:
    """An observer cannot continue either: the servers end."""
    cluster.deal(0, 1, 2, 3)

    def stop(step: int) -> None:
        cluster.stopping = True
        cluster.wait_until(lambda: job.stopping)

    with pytest.raises(Stopping, match="the job ends"), started(cluster) as (job, net, optimizer):
        train(job, net, optimizer, stop)

    assert cluster.counted == [(1, 1)]
    assert cluster.left == {1: ""}


def test_stopping_is_no_exception_that_scripts_swallow(cluster: FakeCluster) -> None:
    """Finally-blocks and with-statements run."""
    cluster.deal(0, 1)
    seen = []

    def script() -> None:
        with started(cluster) as (job, net, optimizer):
            for _ in range(58):
                try:
                    train(job, net, optimizer, ask_at(0))
                except Exception:
                    seen.append("swallowed")
                finally:
                    seen.append("finally")
                seen.append("evaluated")

    with pytest.raises(SystemExit) as caught:
        script()

    assert (type(caught.value), caught.value.code, seen) == (Stopping, 0, ["finally"])
    assert str(caught.value) == "this worker was asked to leave"


def test_unused_batches_are_returned(cluster: FakeCluster) -> None:
    cluster.deal(0, 1, 2, 3, 4, 5, 6)

    def script() -> None:
        with started(cluster) as (job, net, optimizer):
            for (x,) in job.batches((DATA,), 1, num_workers=1, prefetch_factor=3):
                drain.ask_all()
                net(x).sum().backward()
                optimizer.step()

    with pytest.raises(Stopping):
        script()

    assert cluster.counted == [(1, 1)]
    used = {batch.number for header in cluster.received for batch in header.batches}
    asked = len(cluster.asked)
    assert sorted({number for _, number in cluster.returned} | used) == list(range(asked))


def test_a_loop_that_the_script_leaves_is_a_boundary_too(cluster: FakeCluster) -> None:
    cluster.deal(0, 1)
    with started(cluster) as (job, net, optimizer):
        for (x,) in job.batches((DATA,), 1):
            drain.ask_all()
            net(x).sum().backward()
            optimizer.step()
            if job.stopping:
                break

        assert cluster.left == {1: "drained"}
        with pytest.raises(Stopping):
            train(job, net, optimizer, lambda step: None)


def test_a_script_that_fails_during_the_drain_leaves_as_failed(cluster: FakeCluster) -> None:
    cluster.deal(0)

    def fail(step: int) -> None:
        drain.ask_all()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), started(cluster) as (job, net, optimizer):
        train(job, net, optimizer, fail)

    assert cluster.left[1] == "drained"
    assert cluster.left[2].startswith("ZeroDivisionError")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())
def test_a_waiting_step_is_abandoned(cluster: FakeCluster, options: dict[str, Any]) -> None:
    cluster.deal(0, 1, 2)

    def hold_up(step: int) -> None:
        if step == 1:
            cluster.waits_for = "worker 9"
            drain.ask_all()

    def script() -> None:
        with started(cluster, **options) as (job, net, optimizer):
            try:
                train(job, net, optimizer, hold_up)
            finally:
                assert cluster.left == {1: "drained"}
                assert cluster.returned == []
                job.report(accuracy=0.5)

    with pytest.raises(Stopping, match="asked to leave, this worker waited"):
        script()
    assert cluster.metrics == {"accuracy": 0.5}


@pytest.mark.usefixtures("quick")
def test_a_waiting_step_in_a_pipeline_is_abandoned(cluster: FakeCluster) -> None:
    cluster.policy = "ssp"
    cluster.deal(0, 1)

    def hold_up(step: int) -> None:
        cluster.waits_for = "worker 9"
        drain.ask_all()

    with pytest.raises(Stopping), started(cluster, pipeline=True) as (job, net, optimizer):
        train(job, net, optimizer, hold_up)

    assert job.stats.stale == 1
    assert cluster.left[1] == "drained"


def test_a_loop_of_the_script_ends_at_its_second_step(cluster: FakeCluster) -> None:
    def script() -> None:
        with started(cluster) as (_, net, optimizer):
            drain.ask_all()
            while True:
                net(DATA).sum().backward()
                optimizer.step()

    with pytest.raises(Stopping):
        script()

    assert cluster.counted == [(1, 1)]
    assert cluster.left == {1: "", 2: ""}


@pytest.mark.usefixtures("quick")
def test_a_worker_that_waits_for_the_first_weights_stops_too(cluster: FakeCluster) -> None:
    net = nn.Linear(1, 1)
    with Client(cluster.addresses) as uploader:
        # registers the model without an upload
        sgd = OptimizerMembers.of(torch.optim.SGD(net.parameters(), lr=0.5))
        uploader.model.agree(ModelAdapter(net, {"": sgd}).spec)
        cluster.control["Register"].extend([lambda: None, drain.ask_all])

        with pytest.raises(Stopping, match="asked to leave"), started(cluster):
            pass


def test_the_first_call_after_the_request_has_the_full_time() -> None:
    """The step in progress may take long to compute: its push is not abandoned for that."""
    now = [100.0]
    asked = Drain(Clock(lambda: now[0], lambda seconds: None))
    asked.ask()
    now[0] += 60.0

    asked.begin()
    asked.check()
    now[0] += drain.MAX_WAIT_SECONDS
    asked.begin()

    with pytest.raises(DrainedError):
        asked.check()


def test_a_worker_that_waits_for_data_leaves_with_the_next_answer(cluster: FakeCluster) -> None:
    cluster.batches.extend([co.NextBatchResponse(waiting_for="worker 9")] * 3)
    with connect(cluster) as client:
        cluster.control["NextBatch"].extend([lambda: None, drain.ask_all])

        lease = client.data.next_batches(LoopSpec(0, 4, 1), idle=True)

        assert (lease.numbers, lease.end, len(cluster.asked)) == ((), False, 2)
