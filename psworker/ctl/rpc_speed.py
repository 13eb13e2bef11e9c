"""Speed of gRPC over 127.0.0.1, with a server and a client in this process."""

import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

import grpc

from pscommon.security.credentials import NONE
from pscommon.wire.endpoint import Endpoint, listen_grpc, open_channel
from pscommon.wire.frames import FRAME_BYTES
from pscommon.wire.status import translated

ECHO = "/paramserver.Doctor/Echo"
STREAM = "/paramserver.Doctor/Stream"
CALL_COUNT = 50
FRAME_COUNT = 128
CALL_SECONDS = 20.0


class RpcSpeed(NamedTuple):
    """Measured speed.

    Attributes:
        round_trip: median time of a tiny call, in milliseconds.
        rate: rate of an echoed stream, in 1e6 bytes a second.
    """

    round_trip: float
    rate: float


def measure() -> RpcSpeed:
    """Measure round trip and rate, in less than a second on a healthy machine.

    Raises:
        PSError: calls over 127.0.0.1 fail.
    """
    server, address = listen_grpc(Endpoint("127.0.0.1:0", NONE), CALL_COUNT, [_Echo()])
    try:
        server.start()
        with (
            open_channel(Endpoint(address, NONE)) as channel,
            translated(f"the test server at {address}"),
        ):
            return RpcSpeed(_round_trip(channel), _rate(channel))
    finally:
        server.stop(None).wait(CALL_SECONDS)


class _Echo(grpc.GenericRpcHandler):
    """Server that returns the bytes it receives."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:  # type: ignore[type-arg]
        if details.method == ECHO:
            return grpc.unary_unary_rpc_method_handler(lambda data, _: data)
        if details.method == STREAM:
            return grpc.stream_stream_rpc_method_handler(lambda frames, _: frames)
        return None


def _round_trip(channel: grpc.Channel) -> float:
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(ECHO)
    call(b"", timeout=CALL_SECONDS)  # connects
    times = []
    for _ in range(CALL_COUNT):
        start = time.perf_counter()
        call(b"x", timeout=CALL_SECONDS)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def _rate(channel: grpc.Channel) -> float:
    frame = bytes(FRAME_BYTES)

    def frames() -> Iterator[bytes]:
        for _ in range(FRAME_COUNT):
            yield frame

    stream: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(STREAM)
    start = time.perf_counter()
    received = sum(map(len, stream(frames(), timeout=CALL_SECONDS)))
    return received / (time.perf_counter() - start) / 1e6
