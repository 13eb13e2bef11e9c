"""Exchanges with a server, message by message."""

from collections.abc import Callable, Iterable, Iterator
from typing import cast

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.requests import EXCHANGE
from tests.support.programs import Program, Programs
from tests.support.workers import until

WAIT = 20.0


@pytest.fixture
def channel() -> Iterator[Callable[[str], grpc.Channel]]:
    """Yield a function that opens channels; close them afterwards."""
    opened: list[grpc.Channel] = []

    def make(address: str) -> grpc.Channel:
        opened.append(open_channel(Endpoint(address)))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


Open = Callable[[str], grpc.Channel]


def reason_of(failure: grpc.RpcError) -> tuple[str, str, set[str]]:
    """Return the status code, the reason and the kinds of details of a failed call."""
    call = cast(grpc.Call, failure)
    found = rpc_status.from_call(call)
    assert found is not None, f"no google.rpc.Status came with: {call.details()}"
    (info,) = [
        detail for detail in found.details if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR)
    ]
    error = error_details_pb2.ErrorInfo()
    info.Unpack(error)
    assert error.domain == "paramserver"
    return (
        call.code().name,
        error.reason,
        {detail.TypeName().rpartition(".")[2] for detail in found.details},
    )


def exchange(channel: grpc.Channel, frames: Iterable[bytes]) -> Iterator[bytes]:
    """Make a raw Exchange."""
    call: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(EXCHANGE.path)
    return call(iter(frames), timeout=WAIT)


def serve(programs: Programs, start: Callable[..., Program], *flags: object) -> tuple[Program, str]:
    """Start a ps-server on a free port; return it and its address. start: method of `programs`."""
    server = start("ps-server", "--bind", "127.0.0.1:0", "--port-file", "port", *flags)
    port = programs.folder / "port"
    until(port.exists, "a port")
    return server, f"127.0.0.1:{port.read_text().strip()}"
