"""Workers cannot act as each other: each request and each greeting has the key of its worker."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pscommon.core.data_loop import LoopSpec
from pscommon.core.errors import AuthenticationError, FencedError, PSError
from pscommon.core.formats import spoken_format
from pscommon.wire.blocking_socket import BlockingSocket
from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.frames import encode_data, encode_header
from pscommon.wire.requests import (
    COLLECTIVE,
    DRAIN,
    LEAVE,
    REQUESTS,
    STREAM_FIELDS,
    AnyRequest,
)
from pscommon.wire.status import error_of, translated
from pscommon.wire.stream_format import FrameKind, encode_frame
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import parameter_server_pb2 as ps
from psproto.v1 import stream_pb2
from psserver.server import Server
from psworker import Client
from tests.support.cluster import Cluster
from tests.support.light_client import LightClient
from tests.support.standbys import RunningStandby, standby_state
from tests.support.wire_calls import exchange, key_of, sent_by
from tests.support.workers import count, counted, counter, status, until

Make = Callable[..., Cluster]
Pair = tuple[Cluster, Client, Client]

LOOP = LoopSpec(0, size=8, batch_size=1)
FROM_WORKERS = [
    row
    for row in REQUESTS
    if row is not DRAIN and (row.is_framed or "worker" in row.request.DESCRIPTOR.fields_by_name)
]
"""Rows that name the worker which sends them."""


@pytest.fixture
def pair(cluster: Make) -> Iterator[Pair]:
    """Yield a job of two shards with two workers; the first one has trained."""
    servers = cluster(2, policy="async", data_dir=None, job="otter")
    with counter(servers.address) as first, counter(servers.address) as second:
        count(first)
        yield servers, first, second


def message(row: AnyRequest, worker: int) -> Any:
    """Return a message of this row that names the worker."""
    own: dict[str, Any] = {"job": "otter", "worker": worker}
    if row.is_framed:
        return ps.ExchangeRequest(header=ps.PushPullHeader(pull=ps.PULL_NONE, **own))
    if row is COLLECTIVE:
        return co.CollectiveRequest(number=1, kind="barrier", **own)
    return row.request(**own)


def refusal(channel: grpc.Channel, row: AnyRequest, worker: int, key: bytes) -> PSError | None:
    call = getattr(channel, row.kind)(row.path)
    raw = message(row, worker).SerializeToString()
    try:
        with translated(str(row)):
            if row.kind == "unary_unary":
                call(raw, timeout=10, metadata=sent_by(key))
            else:
                list(call(iter([raw]), timeout=10, metadata=sent_by(key)))
    except PSError as error:
        return error
    return None


def test_each_request_that_names_a_worker_needs_its_key(pair: Pair) -> None:
    servers, first, second = pair
    assert [row for row in REQUESTS if row.names_sender] == FROM_WORKERS
    for row in sorted(FROM_WORKERS, key=lambda row: row is LEAVE):
        is_on_all = "ParameterServer" in row.service
        for server in servers.servers if is_on_all else servers.servers[:1]:
            with open_channel(Endpoint(server.address)) as channel:
                for key in (b"", key_of(second), key_of(first)[:-1], b"x"):
                    error = refusal(channel, row, first.worker, key)
                    assert isinstance(error, AuthenticationError), (row, key, error)
                    assert (error.exit_code, error.reason) == (13, "UNAUTHENTICATED")
                    assert f"worker {first.worker} " in str(error)
                    assert key_of(first).hex() not in str(error)
                own = refusal(channel, row, second.worker, key_of(second))
                assert not isinstance(own, AuthenticationError), (row, own)
    count(first)


def refused_push(servers: Cluster, frames: list[bytes], key: bytes) -> PSError:
    """Return the error with which shard 0 refuses an Exchange."""
    with (
        open_channel(Endpoint(servers.address)) as channel,
        pytest.raises(PSError) as caught,
        translated("shard 0"),
    ):
        list(exchange(channel, frames, key))
    return caught.value


def test_an_observer_needs_no_key_and_cannot_push(pair: Pair) -> None:
    servers, _, _ = pair
    push = ps.PushPullHeader(job="otter", seq=1, has_data=True, samples=1, wait_ms=5000)
    nbytes = servers.servers[0].engine.live.require_store().step_nbytes
    with Client(servers.address, observe=True) as observer:
        assert counted(observer.pull()) == 1
    frames = [encode_header(push), encode_data(memoryview(bytes(nbytes)))]
    assert isinstance(refused_push(servers, frames, b""), FencedError)
    assert status(servers.address)["version"] == 1


def test_the_end_of_an_open_push_names_no_other_worker(pair: Pair) -> None:
    """Else its pull could go to the shared memory of that worker."""
    servers, first, second = pair
    push = ps.PushPullHeader(
        job="otter", worker=second.worker, seq=1, has_data=True, samples=1, open=True
    )
    end = ps.PushPullHeader(worker=first.worker, samples=1)
    frames = [encode_header(push), encode_header(end)]
    assert refused_push(servers, frames, key_of(second)).reason == "INVALID_REQUEST"


# ---- streams -------------------------------------------------------------------------------------


def greet(server: Server, worker: int, key: bytes, purpose: Any = 0) -> None:
    hello = stream_pb2.StreamHello(
        format=spoken_format(),
        job="otter",
        shard=server.identity.shard,
        worker=worker,
        purpose=purpose,
        key=key,
    )
    BlockingSocket.open(server.identity.stream_address, hello, "the server").close()


def test_a_greeting_needs_the_key_of_its_worker(pair: Pair) -> None:
    servers, first, second = pair
    for server in servers.servers:
        for purpose in (
            stream_pb2.StreamHello.PURPOSE_UNSPECIFIED,
            stream_pb2.StreamHello.PURPOSE_REQUESTS,
        ):
            for key in (b"", key_of(second)):
                with pytest.raises(AuthenticationError, match=f"worker {first.worker} "):
                    greet(server, first.worker, key, purpose)
            greet(server, second.worker, key_of(second), purpose)
    count(first)


def test_messages_on_a_stream_name_the_worker_that_opened_it(pair: Pair) -> None:
    servers, first, second = pair
    server = servers.servers[0]
    joined = co.JoinResponse(job="otter", worker=second.worker, key=key_of(second))

    def answer(kind: FrameKind, sent: Any) -> PSError | None:
        client = LightClient(joined, server.identity.stream_address)
        with client.sock:
            client.sock.sendall(encode_frame(kind, sent.SerializeToString()))
            found, raw, _ = client.answer()
        return error_of(raw, "the server") if found is FrameKind.ERROR else None

    for row, field in STREAM_FIELDS.items():
        for worker, is_own in ((second.worker, True), (first.worker, False), (0, False)):
            sent = stream_pb2.CoordinatorRequest(**{field: message(row, worker)})
            error = answer(FrameKind.REQUEST, sent)
            assert isinstance(error, AuthenticationError) != is_own, (row, error)
    for worker, is_own in ((second.worker, True), (first.worker, False), (0, False)):
        header = ps.PushPullHeader(job="otter", worker=worker, pull=ps.PULL_NONE)
        error = answer(FrameKind.EXCHANGE, header)
        assert isinstance(error, AuthenticationError) != is_own, error
    count(first)


@pytest.mark.parametrize("lanes", ["stream", "grpc", "shm"])
def test_a_worker_that_rejoins_uses_its_new_key(cluster: Make, lanes: str) -> None:
    """Also for its requests to the coordinator, whose streams have greeted with the old one."""
    servers = cluster(1, policy="async")
    with counter(servers.address, lanes=lanes) as client:
        count(client)
        assert client.data.next_batches(LOOP).numbers == (0,)
        old = client.worker
        client.rejoin()
        assert client.worker != old
        assert client.data.next_batches(LOOP).numbers == (0,)
        count(client)
        assert client.data.next_batches(LOOP).numbers == (1,)


# ---- the job key ---------------------------------------------------------------------------------


def test_keys_stay_valid_when_each_server_restarts(cluster: Make, tmp_path: Path) -> None:
    lasting: dict[str, Any] = {"policy": "async", "durability": "log", "data_dir": tmp_path}
    servers = cluster(2, **lasting)
    leader, shard = servers.servers
    job_key = leader.identity.worker_keys.job_key
    path = tmp_path / "job-key"
    assert (path.stat().st_mode & 0o777, path.read_text()) == (0o600, job_key.hex())
    with counter(servers.address) as client:
        worker = client.worker
        count(client)
        servers.servers.remove(shard)
        shard.close()
        shard = servers.add(1, 2, bind=shard.address, **lasting)
        count(client)
        assert shard.identity.worker_keys.job_key == job_key
        servers.servers.remove(leader)
        leader.close()
        again = servers.add(0, 2, bind=leader.address, **lasting)
        assert again.identity.worker_keys.job_key == job_key
        count(client)
        assert client.worker == worker


@pytest.mark.parametrize("shards", [1, 2])
def test_a_standby_knows_the_job_key(cluster: Make, shards: int) -> None:
    server = cluster(shards, policy="async").servers[-1]
    until(lambda: server.identity.worker_keys.job_key, "the job key")
    job_key = server.identity.worker_keys.job_key
    with RunningStandby(server) as following:
        following.in_sync()
        assert standby_state(following).hello.job_key == job_key.hex()


def test_without_a_data_directory_workers_rejoin_after_a_restart_of_shard_0(cluster: Make) -> None:
    """Worker numbers begin again: the earlier worker 1 is not the later one, on any shard."""
    servers = cluster(2, policy="async", job="otter")
    leader, shard = servers.servers
    with counter(servers.address) as client:
        count(client)
        worker, key = client.worker, key_of(client)
        servers.servers.remove(leader)
        leader.close()
        again = servers.add(0, 2, bind=leader.address, policy="async", job="otter")
        servers.servers.reverse()
        until(
            lambda: shard.identity.worker_keys.job_key == again.identity.worker_keys.job_key,
            "the new key of the job",
        )
        with counter(again.address) as other:
            assert (other.worker, key_of(other) != key) == (worker, True)
            with pytest.raises(FencedError):
                count(client)
            client.rejoin()
            assert client.worker != worker
            count(other)
            assert counted(other.pull()) == 1
