"""Exchanges with a server, message by message."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.requests import EXCHANGE, WORKER_KEY
from psserver.process.worker_keys import WorkerKeys
from psserver.server import Server
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


def sent_by(key: bytes) -> tuple[tuple[str, bytes], ...]:
    """Return the metadata of calls of the worker with this key."""
    return ((WORKER_KEY, key),)


def key_of(client: Any) -> bytes:
    """Return the key of a client's worker."""
    return bytes(client._connection.transport._keys[client.worker])


class OwnKeys(grpc.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    """Sends each request with the key of the worker that it names."""

    def __init__(self, keys: WorkerKeys) -> None:
        self._keys = keys

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        own = sent_by(self._keys.key_of(getattr(request, "worker", 0)))
        return continuation(details._replace(metadata=own), request)


def keyed(channel: grpc.Channel, server: Server) -> grpc.Channel:
    """Return a channel for requests of any worker of this server's job."""
    return grpc.intercept_channel(channel, OwnKeys(server.identity.worker_keys))


def exchange(channel: grpc.Channel, frames: Iterable[bytes], key: bytes = b"") -> Iterator[bytes]:
    """Make a raw Exchange. key: The worker's."""
    call: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(EXCHANGE.path)
    return call(iter(frames), timeout=WAIT, metadata=sent_by(key))


def serve(programs: Programs, start: Callable[..., Program], *flags: object) -> tuple[Program, str]:
    """Start a ps-server on a free port; return it and its address. start: method of `programs`."""
    server = start("ps-server", "--bind", "127.0.0.1:0", "--port-file", "port", *flags)
    port = programs.folder / "port"
    until(port.exists, "a port")
    return server, f"127.0.0.1:{port.read_text().strip()}"
