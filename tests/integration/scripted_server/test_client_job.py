"""The Client as a member of a job, with servers in memory: join, leave, heartbeats, data."""

import pickle
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pscommon.core.data_loop import LoopSpec
from pscommon.core.errors import InvalidRequestError, MismatchError
from pscommon.core.log_entries import BatchKey
from pscommon.core.model_spec import OptimizerSettings
from psproto.v1 import coordinator_pb2 as co
from psworker.client.client import Client
from psworker.core.results import StepProgress
from tests.support.fake_job import lost
from tests.support.fake_server import FakeCluster

SGD = OptimizerSettings("sgd", ({"lr": 0.5},))
LOOP = LoopSpec(loop=0, size=100, batch_size=10, first_epoch=2)


def params() -> dict[str, Any]:
    return {"w": np.ones((100, 30), np.float32)}


def gradient() -> dict[str, Any]:
    return {"w": np.full((100, 30), 2, np.float32)}


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(shards=2) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: FakeCluster) -> Iterator[Client]:
    with Client(cluster.addresses[0]) as client:
        client.register(params(), SGD)
        yield client


def test_an_observer_reads_and_takes_no_part(client: Client, cluster: FakeCluster) -> None:
    client.push(gradient())
    with Client(cluster.addresses, observe=True) as observer:
        assert observer.worker == 0
        assert (observer.pull()["w"] == 0).all()
        assert observer.status() == {"job": "job-1", "state": "running"}
        with pytest.raises(InvalidRequestError, match="observer"):
            observer.push(gradient())
        with pytest.raises(InvalidRequestError, match="observer"):
            observer.register(params(), SGD)

    assert len(cluster.joins) == 1


def test_the_environment_names_servers_job_and_rank(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PS_SERVERS", ",".join(cluster.addresses))
    monkeypatch.setenv("PS_WORKER_RANK", "3")
    with Client(device="cuda:1"):
        pass
    with Client(rank=7):
        pass
    monkeypatch.setenv("PS_JOB", "another")
    with pytest.raises(MismatchError, match="not another"):
        Client()
    with Client(cluster.addresses):
        pass

    assert [(join.rank, join.HasField("rank")) for join in cluster.joins] == [
        (3, True),
        (7, True),
        (0, False),
    ]
    assert cluster.joins[0].device == "cuda:1"
    assert cluster.joins[0].host
    assert cluster.joins[0].pid


def test_a_missing_server_address_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PS_SERVERS", raising=False)
    with pytest.raises(InvalidRequestError, match="PS_SERVERS"):
        Client()


def test_close_leaves_once_as_done(cluster: FakeCluster) -> None:
    client = Client(cluster.addresses)
    client.register(params(), SGD)
    client.close()
    client.close()
    client.leave("again")

    assert cluster.left == {1: ""}
    assert cluster.calls["Leave"] == 1
    with pytest.raises(InvalidRequestError, match="closed"):
        client.pull()


def test_leave_gives_a_reason_and_ends_calls(cluster: FakeCluster) -> None:
    with Client(cluster.addresses) as client:
        client.leave("drained")
        with pytest.raises(InvalidRequestError, match="left"):
            client.report(loss=1)

    assert cluster.left == {1: "drained"}


def test_a_script_that_raises_leaves_as_failed(cluster: FakeCluster) -> None:
    with pytest.raises(KeyError), Client(cluster.addresses):
        raise KeyError("oops")

    assert cluster.left == {1: "failed: KeyError"}


def test_no_thread_remains(cluster: FakeCluster) -> None:
    def ours() -> set[str]:
        names = {thread.name for thread in threading.enumerate()}
        return {name for name in names if name.startswith(("heartbeat", "psworker"))}

    with Client(cluster.addresses) as client:
        client.register(params(), SGD)
        during = ours()

    assert during == {"heartbeat-1", "psworker-shard-1"}
    assert ours() == set()


def test_heartbeats_carry_progress_and_bring_stopping(cluster: FakeCluster) -> None:
    cluster.lease = 0.1
    with Client(cluster.addresses) as client:
        client.show_progress(StepProgress(5, 0.5, 64.0, "compute", {"data": 0.25, "wait": 1.5}))
        cluster.wait_until(lambda: cluster.beats and cluster.beats[-1].steps == 5)
        assert not client.stopping
        cluster.stopping = True
        seen = len(cluster.beats)
        cluster.wait_until(lambda: len(cluster.beats) > seen + 2)

        assert client.stopping
        assert (cluster.beats[-1].phase, cluster.beats[-1].step_seconds) == ("compute", 0.5)
        assert cluster.beats[-1].samples_per_second == 64
        assert cluster.beats[-1].phases == co.PhaseSeconds(data=0.25, wait=1.5)


def test_reports_and_returned_batches_are_sent(cluster: FakeCluster) -> None:
    with Client(cluster.addresses) as client:
        client.report(accuracy=np.float32(0.5), steps=3)
        client.data.return_batches([BatchKey(0, 1), BatchKey(2, 3)])

    assert cluster.metrics == {"accuracy": 0.5, "steps": 3.0}
    assert cluster.returned == [(0, 1), (2, 3)]


def test_several_batches_are_leased_at_once(cluster: FakeCluster) -> None:
    cluster.batches.append(co.NextBatchResponse(numbers=[4, 5], version=9))
    with Client(cluster.addresses) as client:
        lease = client.data.next_batches(LOOP, count=2, idle=True)

    assert (lease.numbers, lease.end, lease.sat_out) == ((4, 5), False, False)
    asked = cluster.asked[0]
    assert (asked.count, asked.idle, asked.received, asked.loop.first_epoch, asked.loop.size) == (
        2,
        False,
        0,
        2,
        100,
    )


def test_no_batches_are_an_empty_lease(cluster: FakeCluster) -> None:
    cluster.batches.append(co.NextBatchResponse(waiting_for="worker 2"))
    with Client(cluster.addresses) as client:
        lease = client.data.next_batches(LOOP)

    assert (lease.numbers, lease.end, lease.sat_out) == ((), False, False)
    assert len(cluster.asked) == 1


def test_waiting_for_batches_is_sitting_out(client: Client, cluster: FakeCluster) -> None:
    cluster.batches.extend(
        [
            co.NextBatchResponse(numbers=[1]),
            co.NextBatchResponse(waiting_for="worker 2"),
            co.NextBatchResponse(waiting_for="worker 2", version=1),
            co.NextBatchResponse(numbers=[7], version=2),
            co.NextBatchResponse(end=True, version=2),
        ]
    )
    client.data.next_batches(LOOP)
    lease = client.data.next_batches(LOOP, idle=True)

    assert (lease.numbers, lease.end, lease.sat_out) == ((7,), False, True)
    assert [asked.idle for asked in cluster.asked] == [False, False, True, True]
    assert [asked.received for asked in cluster.asked] == [0, 1, 1, 1]
    assert client.data.next_batches(LOOP, idle=True).end
    assert cluster.asked[-1].received == 2


def test_a_worker_that_sat_out_pulls_the_version_of_its_batch(
    client: Client, cluster: FakeCluster
) -> None:
    cluster.batches.extend([co.NextBatchResponse(), co.NextBatchResponse(numbers=[7], version=1)])
    client.data.next_batches(LOOP, idle=True)
    with cluster.changed:
        cluster.version = 1

    client.pull()

    assert cluster.received[-1].min_version == 1
    assert client.version == 1


def test_a_lost_answer_with_batches_is_requested_again(cluster: FakeCluster) -> None:
    cluster.control["NextBatch"].append(lost)
    cluster.batches.append(co.NextBatchResponse(numbers=[4]))
    with Client(cluster.addresses) as client:
        assert client.data.next_batches(LOOP).numbers == (4,)

    assert [asked.received for asked in cluster.asked] == [0, 0]


def test_a_client_cannot_be_pickled_and_names_a_remedy(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match="create a Client there"):
        pickle.dumps(client)


def test_a_push_ends_with_an_error_when_another_thread_closes_the_client(
    client: Client, cluster: FakeCluster
) -> None:
    cluster.waits_for = "worker 2"
    errors: list[BaseException] = []

    def push() -> None:
        try:
            client.push(gradient())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=push)
    thread.start()
    cluster.wait_until(lambda: any(header.seq for header in cluster.received))
    client.close()
    thread.join(10)
    assert [(type(error), str(error)) for error in errors] == [
        (InvalidRequestError, "this Client is closed")
    ]
