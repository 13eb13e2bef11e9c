"""Invalid requests over gRPC to real servers are refused with a reason, and the job continues."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pscommon.core.data_loop import LoopSpec
from pscommon.core.data_stream import StreamSpec
from pscommon.core.errors import InvalidRequestError, PSError
from pscommon.core.limits import MAX_LOOPS, MAX_TENSORS
from pscommon.core.log_entries import BatchKey
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.messages import loop_to_proto, model_to_proto
from pscommon.wire.status import translated
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import model_pb2 as mo
from psproto.v1 import parameter_server_pb2 as ps
from psproto.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from psserver.core.coordinator.registration import Registration
from psserver.server import Server
from psworker import Client
from psworker.ctl.job_client import CoordinatorClient
from tests.support.cluster import Cluster
from tests.support.events import events
from tests.support.standbys import RunningStandby
from tests.support.wire_calls import keyed
from tests.support.workers import count, counted, counter, digest, status, until

Make = Callable[..., Cluster]

LOOP = LoopSpec(0, size=1000, batch_size=1)
EMPTY = StreamSpec(1, sources=2, batch_size=3, epochs=0)
HUGE = ModelSpec((TensorSpec("w", (2**40,), "float64", "frozen"),), OptimizerSettings("sgd"))
LARGEST = 2**32 - 1


def largest_numbers(worker: int) -> Iterator[tuple[str, Any]]:
    """Return method and request: each number of a loop or call at its largest, the others valid."""
    data = {"worker": worker, "count": 1}
    for number in (MAX_LOOPS + 1, LARGEST):
        loop = loop_to_proto(LoopSpec(number, size=1000, batch_size=1))
        stream = loop_to_proto(StreamSpec(number, sources=2, batch_size=3))
        yield "NextBatch", co.NextBatchRequest(loop=loop, **data)
        yield "NextBatch", co.NextBatchRequest(loop=loop, idle=True, first_open=1, **data)
        yield "NextBatch", co.NextBatchRequest(loop=stream, **data)
    here, call = loop_to_proto(LOOP), {"worker": worker, "kind": "barrier"}
    yield "NextBatch", co.NextBatchRequest(loop=here, first_open=2**64 - 1, **data)
    yield "NextBatch", co.NextBatchRequest(loop=here, received=2**64 - 1, **data)
    yield "Collective", co.CollectiveRequest(number=2**64 - 1, **call)
    yield "Collective", co.CollectiveRequest(number=1, first_open=2**64 - 1, **call)


def requests(worker: int) -> Iterator[tuple[str, Any, str]]:
    """Return method, request and reason of the refusal."""
    for method, request in largest_numbers(worker):
        yield method, request, "OUT_OF_RANGE"
    huge, loop = model_to_proto(HUGE), loop_to_proto(LOOP)
    endless = loop_to_proto(StreamSpec(2, 2**20, 1, 2**31))
    yield "Join", co.JoinRequest(format=3, rank=LARGEST), "OUT_OF_RANGE"
    yield "Join", co.JoinRequest(format=3, host="h" * 100_000), "OUT_OF_RANGE"
    yield "Register", co.RegisterRequest(worker=worker, model=huge), "OUT_OF_RANGE"
    yield "Register", co.RegisterRequest(worker=worker, model=huge, wait_ms=LARGEST), "OUT_OF_RANGE"
    tensors = [mo.TensorSpec(name="w")] * (MAX_TENSORS + 1)
    many = co.RegisterRequest(worker=worker, model=mo.ModelSpec(tensors=tensors))
    yield "Register", many, "OUT_OF_RANGE"
    nested = mo.ModelSpec(optimizer_json="[" * 100_000)
    yield "Register", co.RegisterRequest(worker=worker, model=nested), "INVALID_REQUEST"
    yield (
        "NextBatch",
        co.NextBatchRequest(worker=worker, loop=loop, count=20_000_000),
        "OUT_OF_RANGE",
    )
    yield (
        "NextBatch",
        co.NextBatchRequest(worker=worker, loop=loop, wait_ms=LARGEST),
        "OUT_OF_RANGE",
    )
    yield "NextBatch", co.NextBatchRequest(worker=worker, loop=endless), "OUT_OF_RANGE"
    yield (
        "NextBatch",
        co.NextBatchRequest(worker=worker, loop=endless, share_only=True),
        "OUT_OF_RANGE",
    )
    yield "NextBatch", co.NextBatchRequest(worker=worker, loop=co.LoopSpec()), "INVALID_REQUEST"
    yield (
        "ReturnBatches",
        returned(worker, ps.Batch(number=5, count=3, end=True, loop=1)),
        "OUT_OF_RANGE",
    )
    yield "ReturnBatches", returned(worker, ps.Batch(number=2**64 - 1)), "OUT_OF_RANGE"
    yield "ReturnBatches", returned(worker, *[ps.Batch()] * 70_000), "OUT_OF_RANGE"
    names = {f"value {number}": 1.0 for number in range(2000)}
    yield "ReportMetrics", co.ReportMetricsRequest(worker=worker, metrics=names), "OUT_OF_RANGE"
    for collective in (
        co.CollectiveRequest(worker=worker, kind="barrier"),
        co.CollectiveRequest(worker=worker, number=1, kind="gather"),
        co.CollectiveRequest(worker=worker, number=1, kind="all_reduce", names=["loss"]),
        co.CollectiveRequest(worker=worker, number=1, kind="broadcast", json="x" * 70_000),
        co.CollectiveRequest(worker=worker, number=1, kind="barrier", samples=2**64 - 1),
        co.CollectiveRequest(worker=worker, number=1, kind="barrier", wait_ms=LARGEST),
    ):
        yield "Collective", collective, "OUT_OF_RANGE"
    for policy in ("ssp", ""):
        yield "SetPolicy", co.SetPolicyRequest(policy=policy), "INVALID_REQUEST"
    for number in (0, 100_000_000):
        yield "Reshard", co.ReshardRequest(shards=number), "OUT_OF_RANGE"
        yield "ScaleWorkers", co.ScaleWorkersRequest(workers=number), "OUT_OF_RANGE"
    yield "Drain", co.DrainRequest(worker=2**63 - 1), "INVALID_REQUEST"
    yield "SaveSnapshot", co.SaveSnapshotRequest(wait_ms=LARGEST), "OUT_OF_RANGE"
    yield "RestoreSnapshot", co.RestoreSnapshotRequest(version=2**63 - 1), "NO_SNAPSHOT"
    yield "Heartbeat", co.HeartbeatRequest(worker=2**63 - 1, phase="p" * 10_000), "FENCED"


def returned(worker: int, *batches: ps.Batch) -> co.ReturnBatchesRequest:
    return co.ReturnBatchesRequest(worker=worker, batches=batches)


def refusals(server: Server, worker: int) -> Iterator[tuple[str, str, str]]:
    """Return method, reason and expected reason of each request."""
    with open_channel(Endpoint(server.address)) as channel:
        stub = CoordinatorServiceStub(keyed(channel, server))
        for method, request, expected in requests(worker):
            with pytest.raises(PSError) as caught, translated(method):
                getattr(stub, method)(request, timeout=10.0)
            yield method, caught.value.reason, expected


def push(
    client: Client, base: int | None = None, batches: tuple[BatchKey, ...] = (), groups: str = ""
) -> str:
    gradients, _ = client.model.flat_buffers()
    gradients[:] = bytes(len(gradients))
    return client.model.exchange(
        gradients=gradients, weights=None, base=base, batches=batches, groups_json=groups
    ).status


@contextmanager
def job(cluster: Make, data_dir: Path) -> Iterator[tuple[Cluster, Client, dict[str, Any]]]:
    settings = {"data_dir": data_dir, "durability": "log", "policy": "async"}
    servers = cluster(2, **settings)
    with counter(servers.address) as client:
        count(client, 2)
        for spec in (LOOP, EMPTY):
            client.data.next_batches(spec, first_open=0)
        yield servers, client, settings


def test_every_invalid_request_is_refused_and_the_job_restarts(
    cluster: Make, tmp_path: Path
) -> None:
    """A worker trains in between; the servers' log yields the same job again."""
    with job(cluster, tmp_path) as (servers, client, settings):
        for method, found, expected in refusals(servers.servers[0], client.worker):
            assert found == expected, method
            count(client)
        before, weights = status(servers.address), digest(servers.address)
        servers.close()
    again = cluster(2, **settings)
    after = status(again.address)

    assert digest(again.address) == weights
    assert [after[key] for key in ("version", "samples", "data")] == [
        before[k] for k in ("version", "samples", "data")
    ]


def test_workers_join_after_each_refused_number_and_after_a_restart(
    cluster: Make, tmp_path: Path
) -> None:
    with job(cluster, tmp_path) as (servers, client, settings):
        with open_channel(Endpoint(servers.address)) as channel:
            stub = CoordinatorServiceStub(keyed(channel, servers.servers[0]))
            for method, request in largest_numbers(client.worker):
                with pytest.raises(PSError) as caught, translated(method):
                    getattr(stub, method)(request, timeout=10.0)
                assert caught.value.reason == "OUT_OF_RANGE", request
                with counter(servers.address) as another:
                    count(another)
        version = client.version
        servers.close()
    again = cluster(2, **settings)
    with counter(again.address) as another:
        count(another)
        assert another.version > version


def test_a_standby_follows_a_job_through_invalid_requests(cluster: Make) -> None:
    servers = cluster(1, policy="async")
    with RunningStandby(servers.servers[0]) as following, counter(servers.address) as client:
        following.in_sync()
        for spec in (LOOP, EMPTY):
            client.data.next_batches(spec, first_open=0)
        for _method, _found, _expected in refusals(servers.servers[0], client.worker):
            count(client)
        assert push(client, base=10**6) == "stale"
        service, standby_service = servers.servers[0].service, following.standby._standby_state
        assert service is not None
        assert standby_service is not None
        assert standby_service.coordinator is not None
        until(
            lambda: (
                standby_service.version == client.version
                or standby_service.version == service.version
            ),
            "the newest update",
        )
        standby, primary = (
            json.dumps(machine.job.as_json())
            for machine in (standby_service.coordinator, service._coordinator)
        )

        assert standby == primary
        assert following.primary.replicator.state == "in sync"


UNFIT: dict[str, dict[str, Any]] = {
    "the end of a stream without epochs": {"batches": (BatchKey(1, 5, 3, True),)},
    "a batch that the loop does not have": {"batches": (BatchKey(0, 5000),)},
}


@pytest.mark.parametrize("name", UNFIT)
def test_an_invalid_push_is_refused_before_anything_is_applied(
    cluster: Make, tmp_path: Path, name: str
) -> None:
    """On two shards; the worker keeps its membership, and its next push counts."""
    with job(cluster, tmp_path) as (servers, client, settings):
        with pytest.raises(InvalidRequestError) as caught:
            push(client, **UNFIT[name])
        assert caught.value.reason == "INVALID_REQUEST"
        assert status(servers.address)["version"] == 2
        count(client, 3)
        assert counted(client.pull()) == 5
        weights = digest(servers.address)
        servers.close()
    again = cluster(2, **settings)

    assert digest(again.address) == weights


def test_an_unexpected_error_in_a_command_does_not_prevent_later_starts(
    cluster: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller gets INTERNAL, the servers continue, and restarts and a standby reach the same
    state.
    """

    def faulty(self: Registration, worker: int) -> None:
        self._job.samples += 1000
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(Registration, "drain", faulty)
    settings = {"data_dir": tmp_path / "primary", "durability": "log", "policy": "async"}
    servers = cluster(1, **settings)
    with RunningStandby(servers.servers[0], data_dir=tmp_path / "standby") as following:
        with counter(servers.address) as client:
            following.in_sync()
            count(client)
            with (
                CoordinatorClient([servers.address], 10.0) as asked,
                pytest.raises(PSError) as caught,
            ):
                asked.drain(client.worker)
            assert caught.value.reason == "INTERNAL"
            count(client, 2)
            weights = digest(servers.address)
        service, standby_service = servers.servers[0].service, following.standby._standby_state
        assert service is not None
        assert standby_service is not None
        assert standby_service.coordinator is not None
        assert standby_service.coordinator.job.samples == service._coordinator.job.samples == 1003
        assert following.primary.replicator.state == "in sync"
        servers.close()
    for _ in range(2):
        again = cluster(1, **settings)
        assert digest(again.address) == weights
        assert status(again.address)["samples"] == 1003
        again.close()
    assert "recorded_command_failed" in events(caplog)


def test_a_push_with_a_negative_learning_rate_is_refused(cluster: Make) -> None:
    """The learning rate of the job is unchanged."""
    servers = cluster(2, policy="sync")
    with counter(servers.address) as client:
        with pytest.raises(InvalidRequestError) as caught:
            push(client, groups='[{"lr": -1.0}]')
        assert caught.value.reason == "OUT_OF_RANGE"
        count(client, 2)
        assert counted(client.pull()) == 2


@pytest.mark.parametrize("policy", ["sync", "async"])
@pytest.mark.parametrize("base", [3, 10**6, 2**63 - 1])
def test_a_push_with_a_base_above_the_version_is_stale_and_not_applied(
    cluster: Make, policy: str, base: int
) -> None:
    """On all shards. The worker's next push counts."""
    servers = cluster(2, policy=policy)
    with counter(servers.address) as client:
        count(client, 2)
        assert push(client, base=base) == "stale"
        assert status(servers.address)["version"] == 2
        count(client)
        assert counted(client.pull()) == 3
