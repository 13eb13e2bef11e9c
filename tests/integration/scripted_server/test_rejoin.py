"""A fenced Client raises, and rejoins as a new worker on request."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pscommon.core.data_loop import LoopSpec
from pscommon.core.errors import FencedError, InvalidRequestError, MismatchError, QuarantinedError
from pscommon.core.model_spec import OptimizerSettings
from psproto.v1 import parameter_server_pb2 as ps
from psworker.client.client import Client
from psworker.exchange.model_exchange import MAX_LOST_MEMBERSHIPS
from tests.support.fake_job import lost
from tests.support.fake_server import FakeCluster

SGD = OptimizerSettings("sgd", ({"lr": 0.5},))
LOOP = LoopSpec(0, size=8, batch_size=1)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(shards=2) as cluster:
        yield cluster


def connect(cluster: FakeCluster, **options: Any) -> Client:
    client = Client(cluster.addresses, connect_timeout=20.0, wait_timeout=20.0, **options)
    client.register({"w": np.ones(50, np.float32)}, SGD)
    return client


def gradient(fill: float = 2.0) -> dict[str, Any]:
    return {"w": np.full(50, fill, np.float32)}


def test_a_fenced_client_rejoins_as_a_new_worker_with_the_same_model(cluster: FakeCluster) -> None:
    with connect(cluster) as client:
        client.push(gradient())
        cluster.fence(1)
        with pytest.raises(FencedError, match="its lease ended"):
            client.push(gradient())

        client.rejoin()

        assert client.worker == 2
        assert (client.pull()["w"] == 0).all()
        assert client.push_pull(gradient()).status == "applied"
        assert (client.weights["w"] == -1).all()
    assert cluster.counted == [(1, 1), (2, 1)]
    assert cluster.left[2] == ""


def test_a_rejoined_client_gets_the_newest_weights_of_the_job(cluster: FakeCluster) -> None:
    """A shard that just restarted may briefly be behind the others."""
    with connect(cluster) as client:
        for _ in range(3):
            client.push(gradient())
        cluster.fence(1)
        seen = len(cluster.received)
        client.rejoin()
        client.pull()

    assert [header.min_version for header in cluster.received[seen:]] == [3, 3]


def test_a_rejoin_changes_neither_rank_nor_attempt(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PS_WORKER_ATTEMPT", "3")
    with connect(cluster, rank=5) as client:
        client.rejoin()

        assert cluster.left == {1: "comes back as a new worker"}
    assert [(join.rank, join.attempt, join.job) for join in cluster.joins] == [(5, 3, "job-1")] * 2


def test_an_attempt_without_a_rank_is_not_sent(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PS_WORKER_ATTEMPT", "3")
    with connect(cluster):
        assert not cluster.joins[0].HasField("rank")
        assert cluster.joins[0].attempt == 0


def test_heartbeats_are_those_of_the_new_worker(cluster: FakeCluster) -> None:
    cluster.lease = 0.1
    with connect(cluster) as client:
        cluster.wait_until(lambda: cluster.beats)
        client.rejoin()
        with cluster.changed:
            cluster.beats.clear()

        cluster.wait_until(lambda: len(cluster.beats) > 3)

    assert {beat.worker for beat in cluster.beats} == {2}


def test_a_membership_lost_by_a_heartbeat_is_left(cluster: FakeCluster) -> None:
    cluster.lease = 0.1
    with connect(cluster) as client:
        cluster.waits_for = "worker 9"
        cluster.control["Heartbeat"].append(_fenced)
        with pytest.raises(FencedError, match="the heartbeat says so"):
            client.push(gradient())
        cluster.release()

        client.rejoin()

        assert client.push(gradient()).status == "applied"


def _fenced() -> None:
    raise FencedError("the heartbeat says so")


def test_a_membership_fenced_at_once_is_followed_by_another(cluster: FakeCluster) -> None:
    """The servers may roll back between a worker's rejoin and its first request."""
    with connect(cluster) as client:
        cluster.fence(1)
        cluster.control["Register"].append(lambda: cluster.fence(2))

        client.rejoin()

        assert client.worker == 3
        assert client.push(gradient()).status == "applied"
    assert set(cluster.left) == {3}


def test_rejoins_that_are_always_fenced_are_limited(cluster: FakeCluster) -> None:
    with connect(cluster) as client:
        cluster.control["Register"].extend([_fenced] * MAX_LOST_MEMBERSHIPS)

        with pytest.raises(FencedError):
            client.rejoin()

        assert client.worker == 1 + MAX_LOST_MEMBERSHIPS
        client.rejoin()
        assert client.push(gradient()).status == "applied"


def test_a_rejoined_client_has_received_no_data(cluster: FakeCluster) -> None:
    """Otherwise the servers would take their next answer for received."""
    cluster.deal(3, 4, 3)
    with connect(cluster) as client:
        for _ in range(2):
            client.data.next_batches(LOOP)
        client.rejoin()

        assert client.data.next_batches(LOOP).numbers == (3,)

    assert [(request.worker, request.received) for request in cluster.asked] == [
        (1, 0),
        (1, 1),
        (2, 0),
    ]


def test_after_a_rollback_the_version_is_that_of_the_servers(cluster: FakeCluster) -> None:
    with connect(cluster) as client:
        for _ in range(3):
            client.push_pull(gradient())
        with cluster.changed:
            cluster.version = 1
        client.rejoin()

        assert client.version == 1
        assert client.pull()  # does not wait for an earlier, higher version
        assert client.push(gradient()).staleness == 0


def test_an_undecided_push_is_not_repeated_under_the_new_number(cluster: FakeCluster) -> None:
    """It may have counted, and would count twice as another worker's. The caller decides what to
    push.
    """
    with connect(cluster) as client:
        for shard in range(2):
            cluster.after[shard].append(lambda: (cluster.fence(1), lost())[1])
        with pytest.raises(FencedError):
            client.push(gradient())
        client.rejoin()

        assert client.push(gradient()).status == "applied"

    assert cluster.counted == [(1, 1), (2, 1)]


def test_servers_that_lost_the_weights_do_not_get_old_ones(cluster: FakeCluster) -> None:
    with connect(cluster) as client:
        with cluster.changed:
            cluster.begun, cluster.plan = False, None

        with pytest.raises(FencedError, match="lost the job's weights"):
            client.rejoin()


def test_another_job_or_model_cannot_be_rejoined(cluster: FakeCluster) -> None:
    with connect(cluster) as client, FakeCluster() as other:
        other.servers[0].cluster = cluster
        cluster.job = "job-2"
        with pytest.raises(MismatchError, match="job-2"):
            client.rejoin()


def test_the_order_of_the_model_must_be_the_same(cluster: FakeCluster) -> None:
    with connect(cluster) as client:
        assert cluster.plan is not None
        cluster.digest = "another"
        with pytest.raises(MismatchError):
            client.rejoin()


def test_a_rejoin_before_registration_only_joins(cluster: FakeCluster) -> None:
    with Client(cluster.addresses) as client:
        cluster.fence(1)
        with pytest.raises(FencedError):
            client.register(gradient(), SGD)
        client.rejoin()

        client.register(gradient(), SGD)

        assert client.worker == 2


def test_an_observer_and_a_closed_client_cannot_rejoin(
    cluster: FakeCluster,
) -> None:
    with (
        Client(cluster.addresses, observe=True) as observer,
        pytest.raises(InvalidRequestError, match="an observer has no membership"),
    ):
        observer.rejoin()
    client = connect(cluster)
    client.close()
    with pytest.raises(InvalidRequestError, match="closed"):
        client.rejoin()


def test_an_open_push_is_closed_first(cluster: FakeCluster) -> None:
    with connect(cluster) as client:
        flow = client.model.begin()
        with pytest.raises(InvalidRequestError, match="under way"):
            client.rejoin()
        flow.close()
        client.rejoin()

        assert client.worker == 2


def test_restarting_servers_are_awaited(cluster: FakeCluster) -> None:
    with connect(cluster) as client:
        cluster.control["Join"].extend([lost, lost])
        cluster.control["Register"].append(lost)

        client.rejoin()

        assert client.push(gradient()).status == "applied"


def test_a_quarantined_push_raises_its_error_and_its_worker_does_not_rejoin(
    cluster: FakeCluster,
) -> None:
    with connect(cluster) as client:
        bad = ps.ExchangeResult(
            outcome=ps.OUTCOME_REJECTED, reason="QUARANTINED", detail="3 bad gradients in a row"
        )
        cluster.outcome = lambda key: bad  # type: ignore[method-assign]
        with pytest.raises(QuarantinedError, match="3 bad gradients"):
            client.push(gradient())

        with pytest.raises(QuarantinedError, match="3 bad gradients"):
            client.rejoin()
        assert cluster.calls["Join"] == 1


def test_a_retired_worker_observes_and_reports(cluster: FakeCluster) -> None:
    """No round waits for a worker that has not registered."""
    with connect(cluster) as client:
        client.push(gradient())

        client.retire("drained")

        assert (client.worker, cluster.left) == (2, {1: "drained"})
        assert (client.pull()["w"] == 0).all()
        client.report(accuracy=0.5)
        assert cluster.calls["Register"] == 2  # both during register: before and after the upload
    assert cluster.metrics == {"accuracy": 0.5}
    assert cluster.left[2] == ""
