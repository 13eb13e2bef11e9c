"""Handlers of rows behind a real gRPC server on loopback: bound, answered and timed."""

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import grpc
import pytest

from pscommon.core.errors import MismatchError
from pscommon.wire.requests import (
    DESCRIBE,
    EXCHANGE,
    EXCHANGE_ONCE,
    INTRODUCE,
    PROMOTE,
    READ_SHARD,
    REPLICATE,
    STEP_DOWN,
    AnyRequest,
    Stub,
)
from psproto.v1 import parameter_server_pb2 as ps
from psproto.v1 import shard_pb2, standby_pb2
from psserver.process.handlers import Handlers, grpc_handler
from psserver.waiting import ThreadWaiter, Waiter

Recorded = queue.Queue[tuple[str, str, float]]


def describe(request: ps.DescribeRequest) -> ps.DescribeResponse:
    return ps.DescribeResponse(shards=2)


def refuse(request: ps.IntroduceRequest) -> ps.IntroduceResponse:
    if request.job == "crash":
        raise ZeroDivisionError
    raise MismatchError("not now", "SHARD_MISMATCH")


def repeat(frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    for frame in frames:
        yield frame
        yield frame


def once(frame: bytes, context: grpc.ServicerContext) -> bytes:
    return frame + frame


def forever(
    request: shard_pb2.ReadShardRequest, context: grpc.ServicerContext
) -> Iterator[shard_pb2.ReadShardResponse]:
    while True:
        yield shard_pb2.ReadShardResponse(start=request.start)


def replicate(
    requests: Iterator[standby_pb2.ReplicateRequest], context: grpc.ServicerContext
) -> Iterator[standby_pb2.ReplicateResponse]:
    yield from (standby_pb2.ReplicateResponse(format=request.format) for request in requests)


async def promote(request: standby_pb2.PromoteRequest, waiter: Waiter) -> object:
    assert isinstance(waiter, ThreadWaiter)
    await waiter.park(request.wait_ms / 1000)
    return standby_pb2.PromoteResponse(term=7)


HANDLERS: Handlers = {
    DESCRIBE: describe,
    INTRODUCE: refuse,
    EXCHANGE: repeat,
    EXCHANGE_ONCE: once,
    READ_SHARD: forever,
    REPLICATE: replicate,
    STEP_DOWN: promote,
    PROMOTE: promote,
}


@pytest.fixture
def recorded() -> Recorded:
    return queue.Queue()


@pytest.fixture
def channel(recorded: Recorded) -> Iterator[grpc.Channel]:
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
        handler = grpc_handler(HANDLERS, record=lambda *call: recorded.put(call))
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with closing(grpc.insecure_channel(f"127.0.0.1:{port}")) as channel:
            yield channel
        server.stop(None).wait(10)


def next_call(recorded: Recorded) -> tuple[str, str]:
    name, code, seconds = recorded.get(timeout=10)
    assert 0 < seconds < 10
    return name, code


def test_unary_calls_are_recorded_once(channel: grpc.Channel, recorded: Recorded) -> None:
    assert Stub(channel, DESCRIBE)(ps.DescribeRequest(), timeout=10).shards == 2

    assert next_call(recorded) == ("Describe", "OK")
    assert recorded.empty()


def test_a_handler_that_waits_has_the_waiter_of_its_thread(
    channel: grpc.Channel, recorded: Recorded
) -> None:
    request = standby_pb2.PromoteRequest(wait_ms=1)

    assert Stub(channel, PROMOTE)(request, timeout=10).term == 7
    assert next_call(recorded) == ("Promote", "OK")


@pytest.mark.parametrize(("job", "code"), [("", "FAILED_PRECONDITION"), ("crash", "INTERNAL")])
def test_an_error_is_recorded_with_the_code_that_the_client_sees(
    channel: grpc.Channel, recorded: Recorded, job: str, code: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        Stub(channel, INTRODUCE)(ps.IntroduceRequest(job=job), timeout=10)

    assert caught.value.code().name == code
    assert next_call(recorded) == ("Introduce", code)


def test_a_stream_is_recorded_when_its_last_response_is_sent(
    channel: grpc.Channel, recorded: Recorded
) -> None:
    frames = iter([b"a", b"b"])
    assert list(Stub(channel, EXCHANGE)(frames, timeout=10)) == [b"a", b"a", b"b", b"b"]
    assert next_call(recorded) == ("Exchange", "OK")

    assert Stub(channel, EXCHANGE_ONCE)(b"a", timeout=10) == b"aa"
    assert next_call(recorded) == ("ExchangeOnce", "OK")

    requests = iter([standby_pb2.ReplicateRequest(format=format) for format in (1, 2)])
    answers = Stub(channel, REPLICATE)(requests, timeout=10)
    assert [answer.format for answer in answers] == [1, 2]
    assert next_call(recorded) == ("Replicate", "OK")


def test_a_cancelled_stream_is_recorded_as_ended(channel: grpc.Channel, recorded: Recorded) -> None:
    call = Stub(channel, READ_SHARD)(shard_pb2.ReadShardRequest(start=3), timeout=10)
    assert next(call).start == 3
    call.cancel()

    assert next_call(recorded) == ("ReadShard", "CANCELLED")


def test_unknown_methods_are_not_recorded(channel: grpc.Channel, recorded: Recorded) -> None:
    """Their names would be a label without bound."""
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/{DESCRIBE.service}/Nonsense")(b"", timeout=10)

    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert recorded.empty()


@pytest.mark.parametrize("row", HANDLERS, ids=str)
def test_a_service_needs_a_handler_for_each_of_its_rows(row: AnyRequest) -> None:
    handlers = {each: handler for each, handler in HANDLERS.items() if each is not row}
    if row is READ_SHARD:  # the only one of its service
        grpc_handler(handlers)
        return
    with pytest.raises(KeyError):
        grpc_handler(handlers)
