"""The RPC timer around a real gRPC server on loopback."""

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import grpc
import pytest

from psserver.process.rpc_metrics import RpcTimer, WrappedHandlers

Recorded = queue.Queue[tuple[str, str, float]]


def echo(request: bytes, context: grpc.ServicerContext) -> bytes:
    return request


def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not now")


def crash(request: bytes, context: grpc.ServicerContext) -> bytes:
    raise ZeroDivisionError


def repeat(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    for request in requests:
        yield request
        yield request


def last(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
    return list(requests)[-1]


def forever(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
    while True:
        yield request


HANDLERS: dict[str, Any] = {
    "Echo": grpc.unary_unary_rpc_method_handler(echo),
    "Refuse": grpc.unary_unary_rpc_method_handler(refuse),
    "Crash": grpc.unary_unary_rpc_method_handler(crash),
    "Repeat": grpc.stream_stream_rpc_method_handler(repeat),
    "Last": grpc.stream_unary_rpc_method_handler(last),
    "Forever": grpc.unary_stream_rpc_method_handler(forever),
}


@pytest.fixture
def recorded() -> Recorded:
    return queue.Queue()


@pytest.fixture
def channel(recorded: Recorded) -> Iterator[grpc.Channel]:
    timer = RpcTimer(lambda *call: recorded.put(call))
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(
            pool, interceptors=[WrappedHandlers([timer.wrap])], options=[("grpc.so_reuseport", 0)]
        )
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("test.Service", HANDLERS)]
        )
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with closing(grpc.insecure_channel(f"127.0.0.1:{port}")) as channel:
            yield channel
        server.stop(None).wait(10)


def next_call(recorded: Recorded) -> tuple[str, str]:
    method, code, seconds = recorded.get(timeout=10)
    assert 0 < seconds < 10
    return method, code


def test_unary_calls_are_recorded_once(channel: grpc.Channel, recorded: Recorded) -> None:
    assert channel.unary_unary("/test.Service/Echo")(b"hello", timeout=10) == b"hello"

    assert next_call(recorded) == ("Echo", "OK")
    assert recorded.empty()


@pytest.mark.parametrize(
    ("method", "code"), [("Refuse", "FAILED_PRECONDITION"), ("Crash", "UNKNOWN")]
)
def test_an_error_is_recorded_with_the_code_that_the_client_sees(
    channel: grpc.Channel, recorded: Recorded, method: str, code: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/test.Service/{method}")(b"", timeout=10)

    assert caught.value.code().name == code
    assert next_call(recorded) == (method, code)


def test_a_stream_is_recorded_when_its_last_response_is_sent(
    channel: grpc.Channel, recorded: Recorded
) -> None:
    assert (
        list(channel.stream_stream("/test.Service/Repeat")(iter([b"a", b"b"]), timeout=10))
        == [b"a"] * 2 + [b"b"] * 2
    )
    assert next_call(recorded) == ("Repeat", "OK")

    assert channel.stream_unary("/test.Service/Last")(iter([b"a", b"b"]), timeout=10) == b"b"
    assert next_call(recorded) == ("Last", "OK")


def test_a_cancelled_stream_is_recorded_as_ended(channel: grpc.Channel, recorded: Recorded) -> None:
    call = channel.unary_stream("/test.Service/Forever")(b"x", timeout=10)
    next(call)
    call.cancel()

    assert next_call(recorded) == ("Forever", "CANCELLED")


def test_unknown_methods_are_not_recorded(channel: grpc.Channel, recorded: Recorded) -> None:
    """Their names would be a label without bound."""
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/test.Service/Nonsense")(b"", timeout=10)

    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert recorded.empty()
