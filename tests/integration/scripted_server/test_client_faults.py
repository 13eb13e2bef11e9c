"""Failures between a worker and its servers: retried, counted once, and reported if permanent."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pscommon.core.errors import (
    FencedError,
    InvalidRequestError,
    MismatchError,
    PSError,
    UnreachableError,
    WaitTimeoutError,
)
from pscommon.core.model_spec import OptimizerSettings
from psproto.v1 import parameter_server_pb2 as ps
from psworker.client.client import Client
from psworker.connection import retry as patience
from psworker.session.drain import DrainedError
from tests.support.fake_job import lost
from tests.support.fake_server import FakeCluster, FakeServer
from tests.support.skipped_time import hour_skipper, lost_for, pushes, when_asked

SGD = OptimizerSettings("sgd", ({"lr": 0.5},))
SIZE = 5000


def gradient(fill: float = 2.0) -> dict[str, Any]:
    return {"w": np.full(SIZE, fill, np.float32)}


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(shards=2) as cluster:
        yield cluster


def connect(
    cluster: FakeCluster, connect_timeout: float = 20.0, wait_timeout: float = 20.0
) -> Client:
    client = Client(cluster.addresses, connect_timeout=connect_timeout, wait_timeout=wait_timeout)
    client.register({"w": np.ones(SIZE, np.float32)}, SGD)
    return client


def raising(error: PSError) -> Callable[[], None]:
    def hook() -> None:
        raise error

    return hook


@pytest.mark.parametrize("shards", [[0], [1], [0, 1]])
def test_a_push_whose_answer_is_lost_counts_once_and_is_applied(
    cluster: FakeCluster, shards: list[int]
) -> None:
    with connect(cluster) as client:
        for shard in shards:
            cluster.after[shard].extend([lost, lost])
        result = client.push_pull(gradient())

        assert (result.status, result.version) == ("applied", 1)
        assert cluster.counted == [(1, 1)]
        assert (client.weights["w"] == 0).all()
        assert client.push(gradient()).status == "applied"
    assert cluster.counted == [(1, 1), (1, 2)]


def test_a_connection_that_breaks_before_the_push_arrives_is_retried(cluster: FakeCluster) -> None:
    with connect(cluster) as client:
        cluster.before[1].extend([lost, lost])

        assert client.push(gradient()).status == "applied"
    assert sum(header.has_data for header in pushes(cluster)) == 2


def test_a_rejected_push_whose_answer_is_lost_is_rejected(cluster: FakeCluster) -> None:
    with connect(cluster) as client:
        for shard in range(2):
            cluster.after[shard].append(lost)
        result = client.push(gradient(np.inf))

        assert (result.status, result.reason) == ("rejected", "NON_FINITE: worker 1: tensor w")


def test_a_pending_push_is_repeated_without_its_bytes(cluster: FakeCluster) -> None:
    with connect(cluster) as client:
        cluster.waits_for = "worker 2"
        done: list[Any] = []
        thread = threading.Thread(target=lambda: done.append(client.push_pull(gradient())))
        thread.start()
        cluster.wait_until(lambda: len(pushes(cluster)) >= 6)
        assert not done
        cluster.release()
        thread.join(20)

        assert done[0].status == "applied"
        assert (client.weights["w"] == 0).all()
    assert sum(header.has_data for header in pushes(cluster)) == 2
    assert {header.seq for header in pushes(cluster)} == {1}


def test_a_break_while_pending_sends_the_bytes_again(cluster: FakeCluster) -> None:
    """The server may have restarted without them."""
    with connect(cluster) as client:
        cluster.waits_for = "worker 2"
        cluster.before[1].extend([lambda: None, lost])
        thread = threading.Thread(target=client.push, args=(gradient(),))
        thread.start()
        cluster.wait_until(lambda: sum(header.has_data for header in pushes(cluster)) == 3)
        cluster.release()
        thread.join(20)

    assert cluster.counted == [(1, 1)]


def test_the_version_is_the_smallest_of_the_shards(cluster: FakeCluster) -> None:
    """Shards apply the log at different speeds; a gradient is as old as its oldest weights."""
    with connect(cluster) as client:
        server = cluster.servers[0]
        original = server._with_weights

        def ahead(header: ps.PushPullHeader, result: ps.ExchangeResult) -> Any:
            result, views = original(header, result)
            result.version += 5
            return result, views

        server._with_weights = ahead  # type: ignore[method-assign]

        assert client.push_pull(gradient()).version == 1
        assert client.version == 1


def test_a_wait_timeout_names_the_awaited_worker_and_step(cluster: FakeCluster) -> None:
    with connect(cluster, wait_timeout=0.2) as client:
        cluster.waits_for = "worker 2 (rank 1)"
        with pytest.raises(
            WaitTimeoutError, match=r"push 1 of worker 1 on shard . at .* for worker 2 \(rank 1\)"
        ):
            client.push(gradient())


def test_waiting_is_logged(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "LOG_SECONDS", 0.0)
    with connect(cluster, wait_timeout=0.2) as client, caplog.at_level(logging.INFO, "psworker"):
        cluster.waits_for = "worker 2 (rank 1)"
        with pytest.raises(WaitTimeoutError):
            client.push(gradient())

    assert "waiting_for=worker 2 (rank 1)" in caplog.text


def test_a_repeated_push_after_a_failure_is_a_duplicate_if_it_counted(cluster: FakeCluster) -> None:
    with connect(cluster) as client:
        cluster.after[0].append(lost_for(hour_skipper(client)))
        with pytest.raises(UnreachableError):
            client.push(gradient())
        cluster.after[0].append(lost)
        result = client.push_pull(gradient())

        assert cluster.counted == [(1, 1)]
        assert (result.status, result.version) == ("duplicate", 1)
        assert (client.weights["w"] == 0).all()
        assert client.push(gradient()).status == "applied"
    assert cluster.counted == [(1, 1), (1, 2)]


def test_a_repeated_push_after_a_timeout_is_applied_if_it_did_not_count(
    cluster: FakeCluster,
) -> None:
    with connect(cluster) as client:
        cluster.waits_for = "worker 2"
        with when_asked(cluster, hour_skipper(client)), pytest.raises(WaitTimeoutError):
            client.push(gradient())
        with when_asked(cluster, cluster.release):
            result = client.push(gradient())

        assert result.status == "applied"
    assert cluster.counted == [(1, 1)]


def test_another_push_after_a_failure_gets_a_new_number(cluster: FakeCluster) -> None:
    """Under the old number a shard that holds the first gradient would mix it with the second."""
    with connect(cluster) as client:
        cluster.before[1].append(lost_for(hour_skipper(client)))
        with pytest.raises(UnreachableError):
            client.push(gradient())
        result = client.push_pull(gradient(4.0))

        assert result.status == "applied"
        assert (client.weights["w"] == -1).all()
    assert cluster.counted == [(1, 2)]


def test_a_missing_server_is_named(cluster: FakeCluster) -> None:
    with connect(cluster, connect_timeout=0.3) as client:
        cluster.servers[1].stop()
        with pytest.raises(UnreachableError, match=f"shard 1 at {cluster.addresses[1]}") as caught:
            client.push(gradient())

        assert type(caught.value) is UnreachableError
        assert caught.value.exit_code == 20


def test_a_restarted_server_is_found(cluster: FakeCluster) -> None:
    with connect(cluster) as client:
        old = cluster.servers[1]
        old.stop()
        threads = [threading.Thread(target=client.push, args=(gradient(),))]
        threads[0].start()
        cluster.wait_until(lambda: len(pushes(cluster)) == 1)
        _restart(cluster, old)
        threads[0].join(20)

    assert cluster.counted == [(1, 1)]


def _restart(cluster: FakeCluster, old: FakeServer) -> None:
    """Start another process on the port of the old one."""
    cluster.servers[old.shard] = FakeServer(cluster, old.shard, joined=True, bind=old.address)


def test_a_job_that_ends_is_not_awaited_for_long(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator has ended the job; this is no failure."""
    monkeypatch.setattr(patience, "LAST_SECONDS", 0.0)
    cluster.lease, cluster.stopping = 0.1, True
    with connect(cluster) as client:
        cluster.wait_until(lambda: len(cluster.beats) > 2)
        cluster.servers[1].stop()
        started = time.monotonic()
        with pytest.raises(DrainedError, match="the job is over"):
            client.push(gradient())

        assert time.monotonic() - started < 10


def test_a_fenced_push_ends_all_later_calls(cluster: FakeCluster) -> None:
    with connect(cluster) as client:
        cluster.fenced.add(1)
        for call in (lambda: client.push(gradient()), client.pull, lambda: client.report(loss=1)):
            with pytest.raises(FencedError, match="worker 1 is no longer a member"):
                call()


def test_a_fenced_heartbeat_ends_a_waiting_push(cluster: FakeCluster) -> None:
    cluster.lease = 0.1
    with connect(cluster) as client:
        cluster.waits_for = "worker 2"
        failures: list[BaseException] = []

        def push() -> None:
            try:
                client.push(gradient())
            except PSError as error:
                failures.append(error)

        thread = threading.Thread(target=push)
        thread.start()
        cluster.wait_until(lambda: pushes(cluster))
        cluster.control["Heartbeat"].append(
            raising(FencedError("the job went on without worker 1"))
        )
        thread.join(20)

        assert type(failures[0]) is FencedError
        for call in (client.pull, lambda: client.report(loss=1)):
            with pytest.raises(FencedError, match="went on without"):
                call()


def test_a_push_rejected_as_fenced_raises(cluster: FakeCluster) -> None:
    with connect(cluster) as client:
        fenced = ps.ExchangeResult(
            outcome=ps.OUTCOME_REJECTED, reason="FENCED", detail="its lease ended"
        )
        cluster.outcome = lambda key: fenced  # type: ignore[method-assign]
        with pytest.raises(FencedError, match="its lease ended"):
            client.push(gradient())


def test_another_job_on_the_servers_is_a_mismatch(cluster: FakeCluster) -> None:
    with connect(cluster) as client:
        cluster.job = "job-2"
        with pytest.raises(MismatchError, match="this is job job-2") as caught:
            client.push(gradient())

        assert caught.value.reason == "JOB_MISMATCH"


def test_unanswered_heartbeats_change_nothing(cluster: FakeCluster) -> None:
    cluster.lease = 0.1
    with connect(cluster) as client:
        cluster.control["Heartbeat"].extend([lost] * 3)
        cluster.wait_until(lambda: len(cluster.beats) > 6)

        assert client.push(gradient()).status == "applied"


def test_an_error_of_one_shard_ends_the_other_calls_at_once(cluster: FakeCluster) -> None:
    """Shard 0 would be awaited until wait_timeout."""
    with connect(cluster, wait_timeout=600) as client:
        cluster.waits_for = "worker 2"
        cluster.before[1].append(raising(InvalidRequestError("3 bytes more than the model has")))
        started = time.monotonic()
        with pytest.raises(InvalidRequestError, match="3 bytes more"):
            client.push(gradient())

        assert time.monotonic() - started < 10


def test_an_internal_error_of_a_server_names_server_and_method(cluster: FakeCluster) -> None:
    with connect(cluster) as client:
        cluster.before[1].append(raising(PSError("list index out of range")))
        with pytest.raises(
            PSError, match=r"shard 1 at 127.* \(Exchange\) failed: INTERNAL: list index"
        ):
            client.pull()


def test_an_unknown_outcome_is_an_error(cluster: FakeCluster) -> None:
    with connect(cluster) as client:
        strange = ps.ExchangeResult(outcome=77)  # type: ignore[arg-type]
        cluster.outcome = lambda key: strange  # type: ignore[method-assign]
        with pytest.raises(PSError, match="outcome 77"):
            client.push(gradient())


@pytest.mark.parametrize(("change", "words"), [(-4, "4 bytes too few"), (4, "4 bytes more")])
def test_a_wrong_number_of_bytes_is_an_error(cluster: FakeCluster, change: int, words: str) -> None:
    with connect(cluster) as client:
        server = cluster.servers[0]
        original = server._with_weights

        def wrong(header: ps.PushPullHeader, result: ps.ExchangeResult) -> Any:
            result, views = original(header, result)
            data = b"".join(views)
            return result, [memoryview(data + b"....")[: len(data) + change]]

        server._with_weights = wrong  # type: ignore[method-assign]
        with pytest.raises(PSError, match=words):
            client.pull()


def test_a_lost_answer_to_join_and_register_is_retried(cluster: FakeCluster) -> None:
    cluster.control["Join"].append(lost)
    cluster.control["Register"].append(lost)
    with connect(cluster) as client:
        assert client.push(gradient()).status == "applied"


def test_a_lost_answer_to_the_upload_is_retried(cluster: FakeCluster) -> None:
    cluster.after[1].append(lost)
    with connect(cluster) as client:
        assert (client.pull()["w"] == 1).all()


def test_nan_in_the_initial_weights_is_refused(cluster: FakeCluster) -> None:
    nan = ps.ExchangeResult(
        outcome=ps.OUTCOME_REJECTED, reason="NON_FINITE", detail="worker 1: tensor w"
    )
    cluster.outcome = lambda key: nan  # type: ignore[method-assign]
    with Client(cluster.addresses) as client, pytest.raises(PSError, match="tensor w") as caught:
        client.register({"w": np.ones(SIZE, np.float32)}, SGD)

    assert caught.value.reason == "NON_FINITE"


def test_close_does_not_wait_for_dead_servers(cluster: FakeCluster) -> None:
    client = connect(cluster)
    for server in cluster.servers:
        server.stop()
    started = time.monotonic()
    client.close()

    assert time.monotonic() - started < 10
