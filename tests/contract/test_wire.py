"""The wire protocol: sizes, services, error reasons, deadlines, and invalid requests."""

import gc
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pscommon.core.errors import UnreachableError
from pscommon.wire.endpoint import MAX_MESSAGE_BYTES
from pscommon.wire.frames import encode_data, encode_header
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import parameter_server_pb2 as ps
from psproto.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from psworker import Client, OptimizerSpec
from tests.support.cluster import Cluster
from tests.support.process_job import stop
from tests.support.programs import Program, programs_in
from tests.support.wire_calls import WAIT, Open, exchange, keyed, reason_of, serve
from tests.support.workers import ONES, connected, count, counted, counter, status

Make = Callable[..., Cluster]


# ---- size ----------------------------------------------------------------------------------------


def resident_bytes() -> int:
    """Return the memory of this process in bytes."""
    (line,) = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmRSS")
    ]
    return int(line.split()[1]) << 10


@pytest.mark.full
def test_a_300_mb_tensor_trains_and_larger_messages_are_refused(
    cluster: Make, channel: Open
) -> None:
    """The limit of 64 MiB applies in both directions. A second step uses no more memory."""
    address = cluster(1).address
    size, memory = 75_000_000, []
    with connected(address) as client:
        client.register({"w": np.zeros(size, np.float32)}, OptimizerSpec("sgd", lr=0.5))
        gradient = {"w": np.full(size, 2.0, np.float32)}
        for _ in range(3):
            assert client.push_pull(gradient).status == "applied"
            memory.append(resident_bytes())
        weights = client.weights["w"]
        assert (weights.nbytes, weights.min(), weights.max()) == (300_000_000, -3.0, -3.0)
    assert memory[2] - memory[1] < 50e6, f"grows: {memory}"
    del client, gradient, weights
    gc.collect()

    assert MAX_MESSAGE_BYTES == 64 << 20
    too_long = encode_data(memoryview(bytes(MAX_MESSAGE_BYTES)))
    with pytest.raises(grpc.RpcError) as caught:
        list(exchange(channel(address), [too_long]))
    assert cast(grpc.Call, caught.value).code() is grpc.StatusCode.RESOURCE_EXHAUSTED


# ---- services ------------------------------------------------------------------------------------


def test_health_is_reported_for_server_and_services(cluster: Make, channel: Open) -> None:
    servers = cluster(2)
    leader, other = (
        health_pb2_grpc.HealthStub(channel(server.address)) for server in servers.servers
    )

    def health(stub: Any, service: str) -> str:
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    assert health(leader, "") == health(other, "") == "SERVING"
    assert health(leader, "psproto.v1.ParameterServerService") == "SERVING"
    assert health(other, "psproto.v1.ParameterServerService") == "SERVING"
    assert health(leader, "psproto.v1.CoordinatorService") == "SERVING"
    for service in ("psproto.v1.CoordinatorService", "no.such.Service"):
        with pytest.raises(grpc.RpcError) as caught:
            health(other, service)
        assert cast(grpc.Call, caught.value).code() is grpc.StatusCode.NOT_FOUND


def test_reflection_lists_and_describes_services(cluster: Make, channel: Open) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel(cluster(1).address))

    def ask(**request: str) -> Any:
        requests = iter([reflection_pb2.ServerReflectionRequest(**request)])
        return next(stub.ServerReflectionInfo(requests, timeout=WAIT))

    listed = {service.name for service in ask(list_services="").list_services_response.service}
    assert listed == {
        "psproto.v1.ParameterServerService",
        "psproto.v1.CoordinatorService",
        "psproto.v1.StandbyService",
        "psproto.v1.ShardService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    described = ask(
        file_containing_symbol="psproto.v1.ParameterServerService"
    ).file_descriptor_response
    assert any(b"PushPullHeader" in file for file in described.file_descriptor_proto)


# ---- reasons -------------------------------------------------------------------------------------

ANOTHER = "another-job"
CALLS: dict[str, tuple[Callable[[CoordinatorServiceStub, str], object], str, str]] = {
    "another job": (
        lambda stub, job: stub.Join(co.JoinRequest(format=3, job=ANOTHER), timeout=WAIT),
        "FAILED_PRECONDITION",
        "JOB_MISMATCH",
    ),
    "an unknown worker": (
        lambda stub, job: stub.Heartbeat(co.HeartbeatRequest(job=job, worker=99), timeout=WAIT),
        "FAILED_PRECONDITION",
        "FENCED",
    ),
    "no model at all": (
        lambda stub, job: stub.Register(co.RegisterRequest(job=job, worker=1), timeout=WAIT),
        "INVALID_ARGUMENT",
        "INVALID_REQUEST",
    ),
    "an unknown optimizer": (
        lambda stub, job: stub.Register(
            co.RegisterRequest(
                job=job,
                worker=1,
                model={
                    "optimizer_json": '{"name": "lamb", "groups": [{}]}',
                    "tensors": [{"name": "a", "shape": [1], "dtype": "float32", "role": 1}],
                },
            ),
            timeout=WAIT,
        ),
        "INVALID_ARGUMENT",
        "UNSUPPORTED_OPTIMIZER",
    ),
    "a snapshot without a folder": (
        lambda stub, job: stub.SaveSnapshot(co.SaveSnapshotRequest(wait_ms=100), timeout=WAIT),
        "FAILED_PRECONDITION",
        "NO_SNAPSHOT",
    ),
    "a loop of no batches": (
        lambda stub, job: stub.NextBatch(
            co.NextBatchRequest(job=job, worker=1, loop={"size": 10}), timeout=WAIT
        ),
        "INVALID_ARGUMENT",
        "INVALID_REQUEST",
    ),
}


@pytest.mark.parametrize(("call", "code", "reason"), CALLS.values(), ids=CALLS.keys())
def test_errors_have_a_reason_code(
    cluster: Make, channel: Open, call: Callable[[Any, str], object], code: str, reason: str
) -> None:
    servers = cluster(1)
    stub = CoordinatorServiceStub(keyed(channel(servers.address), servers.servers[0]))

    with pytest.raises(grpc.RpcError) as caught:
        call(stub, status(servers.address)["job"])

    assert reason_of(caught.value) == (code, reason, {"ErrorInfo"})


def test_temporary_errors_have_a_retry_delay(cluster: Make, channel: Open, tmp_path: Path) -> None:
    stub = CoordinatorServiceStub(channel(cluster(1, data_dir=tmp_path).address))

    with pytest.raises(grpc.RpcError) as caught:
        stub.SaveSnapshot(co.SaveSnapshotRequest(wait_ms=100), timeout=WAIT)

    assert reason_of(caught.value) == ("UNAVAILABLE", "NOT_READY", {"ErrorInfo", "RetryInfo"})


# ---- nonsense ------------------------------------------------------------------------------------


def header(job: str, worker: int, **fields: Any) -> bytes:
    return encode_header(
        ps.PushPullHeader(job=job, worker=worker, seq=1, has_data=True, samples=1, **fields)
    )


GARBAGE: dict[str, Callable[[str, int], list[bytes]]] = {
    "no frame at all": lambda job, worker: [],
    "an empty frame": lambda job, worker: [b""],
    "random bytes": lambda job, worker: [bytes(range(255, 0, -1))],
    "a length that lies": lambda job, worker: [b"\x12\xff\xff\xff\xff\x0f abc"],
    "data before a header": lambda job, worker: [encode_data(memoryview(b"abcd"))],
    "a header after the header": lambda job, worker: [header(job, worker)] * 2,
    "random bytes after the header": lambda job, worker: [header(job, worker), b"\xff" * 40],
    "too few bytes": lambda job, worker: [header(job, worker), encode_data(memoryview(bytes(64)))],
    "too many bytes": lambda job, worker: [
        header(job, worker),
        *[encode_data(memoryview(bytes(1 << 20)))] * 3,
    ],
    "a tensor that is not there": lambda job, worker: [header(job, worker, absent=[7])],
    "hyper-parameters that are none": lambda job, worker: [
        header(job, worker, groups_json="[{]"),
        encode_data(memoryview(bytes(960))),
    ],
}


@pytest.mark.parametrize("frames", GARBAGE.values(), ids=GARBAGE.keys())
def test_an_invalid_exchange_is_refused_without_effect(
    cluster: Make, channel: Open, frames: Callable[[str, int], list[bytes]]
) -> None:
    servers = cluster(1)
    address, key = servers.address, servers.servers[0].identity.worker_keys.key_of(99)
    with counter(address) as client:
        count(client)

        with pytest.raises(grpc.RpcError) as caught:
            list(exchange(channel(address), frames(client.job, 99), key))

        assert reason_of(caught.value)[:2] == ("INVALID_ARGUMENT", "INVALID_REQUEST")
        count(client)
        assert counted(client.pull()) == 2


def test_the_server_survives_bytes_that_are_no_request(cluster: Make, channel: Open) -> None:
    address = cluster(1).address
    for method in ("CoordinatorService/Join", "ParameterServerService/Introduce"):
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel(address).unary_unary(
            f"/psproto.v1.{method}"
        )
        with pytest.raises(grpc.RpcError):
            call(b"\xff" * 100, timeout=WAIT)

    with counter(address) as client:
        count(client)


def test_a_push_of_an_unknown_worker_is_fenced(cluster: Make, channel: Open) -> None:
    servers = cluster(1)
    address, key = servers.address, servers.servers[0].identity.worker_keys.key_of(99)
    with counter(address) as client:
        frames = [
            header(client.job, 99, pull=ps.PULL_NONE, wait_ms=5000),
            encode_data(memoryview(bytes(960))),
        ]

        with pytest.raises(grpc.RpcError) as caught:
            list(exchange(channel(address), frames, key))

        assert reason_of(caught.value)[:2] == ("FAILED_PRECONDITION", "FENCED")
        count(client)
        assert counted(client.pull()) == 1


# ---- deadlines -----------------------------------------------------------------------------------

SILENCE = 1.5
"""connect_timeout of the clients here; the errors must come within it, give or take this much
for a busy machine.
"""
SPARE = 3.0


@pytest.fixture(scope="module")
def stopped_server(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Program, str, Client]]:
    """Yield a server stopped by SIGSTOP, its address, and a client that trained with it before."""
    with programs_in(tmp_path_factory.mktemp("stopped")) as programs:
        server, address = serve(programs, programs.fork)
        client = counter(address, connect_timeout=SILENCE)
        count(client)
        stop(server)
        yield server, address, client
        server.send(signal.SIGCONT)
        client.close()


@pytest.mark.timing
@pytest.mark.every(3)
@pytest.mark.parametrize(
    "request_of", ["push", "pull", "push_pull", "report", "status", "a new client"]
)
def test_an_unresponsive_server_is_reported_within_the_timeout(
    stopped_server: tuple[Program, str, Client], request_of: str
) -> None:
    _, address, client = stopped_server
    calls: dict[str, Callable[[], object]] = {
        "push": lambda: client.push(ONES),
        "pull": client.pull,
        "push_pull": lambda: client.push_pull(ONES),
        "report": lambda: client.report(loss=1.0),
        "status": client.status,
        "a new client": lambda: connected(address, connect_timeout=SILENCE),
    }

    began = time.monotonic()
    with pytest.raises(UnreachableError, match=address) as caught:
        calls[request_of]()

    assert time.monotonic() - began < SILENCE + SPARE
    assert caught.value.exit_code == 20
