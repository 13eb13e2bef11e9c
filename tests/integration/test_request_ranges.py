"""The ends of each range of each request, and numbers beyond them, sent to a server.

With its log on, workers join after them, and after a restart.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc

from pscommon.core.data_loop import LoopSpec
from pscommon.core.errors import PSError
from pscommon.core.log_entries import BatchKey
from pscommon.core.script_place import PassName, ScriptPlace
from pscommon.wire import requests as rows
from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.requests import REQUESTS, STREAM_FIELDS, AnyRequest
from pscommon.wire.status import error_from, error_of
from pscommon.wire.stream_format import FrameKind, encode_frame
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import parameter_server_pb2 as ps
from psproto.v1 import stream_pb2
from psserver.process.worker_keys import WorkerKeys
from psserver.server import Server
from tests.support.cluster import Cluster
from tests.support.light_client import LightClient
from tests.support.request_bases import bases
from tests.support.request_numbers import NumberCase, cases
from tests.support.wire_calls import key_of, sent_by
from tests.support.workers import count, counter, digest

Make = Callable[..., Cluster]

LOOP = LoopSpec(0, size=1000, batch_size=1)
PASS_SPEC = LoopSpec(0, size=8, batch_size=1)
FIRST_PASS = ScriptPlace(PassName("later", 0), {}, 0, 1)
CALL_SECONDS = 0.5
"""An accepted wait of a day ends with the call."""

SETTINGS: dict[str, Any] = {"durability": "log", "policy": "async"}
WAITS = "the call waits"


def bases_of(server: Server, worker: int) -> Mapping[AnyRequest, Any]:
    """Return valid messages to a server. worker: A member that the test can do without."""
    assert server.service is not None
    nbytes = server.engine.live.require_store().step_nbytes
    return bases(server.identity.job, server.service.plan.spec, worker, nbytes)


def send(channel: grpc.Channel, row: AnyRequest, message: Any, keys: WorkerKeys) -> str:
    """Return the refusal of a request, as reason and text; empty if it was accepted.

    It has the key of the worker that it names.
    """
    raw: Any = message.SerializeToString()
    worker = (message.header if row.is_framed else message).worker if row.names_sender else 0
    own = sent_by(keys.key_of(worker))
    call = getattr(channel, row.kind)(row.path)
    try:
        if row.kind == "unary_unary":
            call(raw, timeout=CALL_SECONDS, metadata=own)
        else:
            answers = call(
                iter([raw]) if row.kind == "stream_stream" else raw,
                timeout=CALL_SECONDS,
                metadata=own,
            )
            next(answers, None)
            answers.cancel()
    except grpc.RpcError as failure:
        if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:  # type: ignore[attr-defined]
            return WAITS
        error = error_from(failure, str(row))
        return f"{error.reason} {error}"
    return ""


def check(case: NumberCase, refusal: str, where: object) -> None:
    """Check the answer to a request with one number at the end of its range, or beyond."""
    text = f"{where} {case}: {refusal}"
    field = case.path[-1]
    name = f"{field.containing_type.name}.{field.name}"
    is_by_range = name in refusal and (
        "is not between" in refusal or "knows no value" in refusal or "items are above" in refusal
    )
    assert is_by_range != case.is_allowed, text
    assert not refusal.startswith(("INTERNAL", "UNREACHABLE", "UNKNOWN")), text


def all_cases() -> Iterator[tuple[AnyRequest, NumberCase]]:
    for row in REQUESTS:
        yield from ((row, case) for case in cases(row.request))


def test_workers_join_and_the_servers_restart_after_each_number(
    cluster: Make, tmp_path: Path
) -> None:
    servers = cluster(1, data_dir=tmp_path, **SETTINGS)
    with counter(servers.address) as client, counter(servers.address) as victim:
        count(client)
        numbered = bases_of(servers.servers[0], victim.worker)
        keys = servers.servers[0].identity.worker_keys
        with open_channel(Endpoint(servers.address)) as channel:
            for row, case in all_cases():
                refused = send(channel, row, case.put(numbered[row]), keys)
                check(case, refused, row)
        train(servers.address)
        count(client)
    before = digest(servers.address)
    servers.close()
    again = cluster(1, data_dir=tmp_path, **SETTINGS)

    assert digest(again.address) == before
    train(again.address)


def train(address: str) -> None:
    """Join, and push a batch of a pass that the job numbers."""
    with counter(address) as client:
        lease = client.data.next_batches(PASS_SPEC, first_open=FIRST_PASS)
        assert lease.loop is not None
        gradients, _ = client.model.flat_buffers()
        gradients[:] = bytes(len(gradients))
        batches = (BatchKey(lease.loop, lease.numbers[0]),)
        pushed = client.model.exchange(gradients=gradients, weights=None, batches=batches)
        assert pushed.status == "applied"


def test_numbers_over_a_stream_are_checked_and_the_stream_goes_on(cluster: Make) -> None:
    """Requests to the coordinator, and headers of pushes."""
    servers = cluster(1, policy="async")
    with counter(servers.address) as client:
        server = servers.servers[0]
        job, address = server.identity.job, server.identity.stream_address
        numbered = bases_of(server, client.worker)
        joined = co.JoinResponse(job=job, worker=client.worker, key=key_of(client))
        own = LightClient(joined, address)
        with own.sock:
            for row, field in STREAM_FIELDS.items():
                for case in cases(row.request):
                    if not case.is_allowed:
                        sent = stream_pb2.CoordinatorRequest()
                        getattr(sent, field).CopyFrom(case.put(numbered[row]))
                        own.sock.sendall(encode_frame(FrameKind.REQUEST, sent.SerializeToString()))
                        check(case, refusal(own), row)
            header, data = numbered[rows.EXCHANGE].header, numbered[rows.EXCHANGE].data
            for case in cases(ps.PushPullHeader):
                if not case.is_allowed:
                    raw = case.put(header).SerializeToString()
                    own.sock.sendall(encode_frame(FrameKind.EXCHANGE, raw, len(data)) + data)
                    check(case, refusal(own), "EXCHANGE")
            own.sock.sendall(
                encode_frame(FrameKind.EXCHANGE, header.SerializeToString(), len(data)) + data
            )
            kind, message, _ = own.answer()
            assert kind is FrameKind.RESULT
            assert ps.ExchangeResult.FromString(message).outcome == ps.OUTCOME_APPLIED


def test_numbers_of_a_greeting_are_checked(cluster: Make) -> None:
    servers = cluster(1)
    server = servers.servers[0]
    server.identity.job = "job"
    hello = stream_pb2.StreamHello(format=3, job="job")
    for case in cases(stream_pb2.StreamHello):
        if not case.is_allowed:
            raw = case.put(hello).SerializeToString()
            peer = LightClient.unanswered(server.identity.stream_address, raw)
            with peer.sock:
                check(case, refusal(peer), "HELLO")


def test_numbers_of_a_shard_are_checked_over_a_stream(cluster: Make) -> None:
    servers = cluster(1)
    server = servers.servers[0]
    hello = stream_pb2.StreamHello(purpose=stream_pb2.StreamHello.PURPOSE_SHARD)
    base = co.LinkShardRequest(format=3, shard=1, shards=2, address="127.0.0.1:1", instance="i")
    for case in cases(co.LinkShardRequest):
        if not case.is_allowed:
            peer = LightClient.unanswered(server.identity.stream_address, hello.SerializeToString())
            with peer.sock:
                assert peer.answer()[0] is FrameKind.WELCOME
                raw = case.put(base).SerializeToString()
                peer.sock.sendall(encode_frame(FrameKind.LINK, data_nbytes=len(raw)) + raw)
                check(case, refusal(peer), "LINK")


def refusal(peer: LightClient) -> str:
    """Return reason and text of the error that a peer gets."""
    kind, message, _ = peer.answer()
    assert kind is FrameKind.ERROR, kind
    error: PSError = error_of(message, "the server")
    return f"{error.reason} {error}"
