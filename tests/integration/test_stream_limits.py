"""Limits of connections to a stream port and of what one worker has in flight."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from pscommon.core.errors import MismatchError
from pscommon.core.limits import MAX_REQUEST_STREAMS
from pscommon.wire.stream_format import FrameKind
from psproto.v1 import stream_pb2
from psserver.sockets import worker_connection
from psserver.sockets.socket_port import SocketPort
from psserver.sockets.worker_connection import UNGREETED
from tests.support.cluster import Cluster
from tests.support.light_client import LightClient
from tests.support.workers import DEADLINE, count, counted, counter, until

Make = Callable[..., Cluster]
FEW_COUNT = 5


@pytest.fixture
def few_ungreeted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_connection, "MAX_UNGREETED_STREAMS", FEW_COUNT)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def silent(stack: ExitStack, address: str) -> socket.socket:
    """Return a connection whose peer sends nothing."""
    host, _, port = address.rpartition(":")
    sock = stack.enter_context(socket.create_connection((host, int(port)), DEADLINE))
    sock.settimeout(DEADLINE)
    return sock


def open_silent(stack: ExitStack, port: SocketPort, number: int) -> list[socket.socket]:
    """Open connections one after another, each counted before the next one."""
    found = []
    for _ in range(number):
        before = list(port.streams._closers.get(UNGREETED, {}))
        found.append(silent(stack, port.address))
        until(
            lambda: list(port.streams._closers.get(UNGREETED, {})) != before,  # noqa: B023
            "the connection",
        )
    return found


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.usefixtures("few_ungreeted")
def test_the_newest_silent_connection_closes_the_oldest(cluster: Make, stack: ExitStack) -> None:
    """A worker is served all the time: it has greeted the server."""
    servers = cluster(1, policy="async")
    port = servers.servers[0]._streams._port
    with counter(servers.address, lanes="stream") as client:
        count(client)
        opened = open_silent(stack, port, FEW_COUNT + 3)
        assert all(is_closed(sock) for sock in opened[:3])
        assert len(port.streams._closers[UNGREETED]) == FEW_COUNT
        for sock in opened[3:]:
            sock.setblocking(False)
            with pytest.raises(BlockingIOError):
                sock.recv(1)
        count(client)
        assert counted(client.pull()) == 2


@pytest.mark.usefixtures("few_ungreeted")
def test_a_standby_closes_the_oldest_silent_connection(stack: ExitStack) -> None:
    port = SocketPort()
    port.open_port("127.0.0.1:0", is_requested=True)
    port.refuse_all(lambda: MismatchError("a standby", "NOT_PRIMARY"))
    try:
        opened = open_silent(stack, port, FEW_COUNT + 1)
        assert is_closed(opened[0])
        assert len(port.streams._closers[UNGREETED]) == FEW_COUNT
    finally:
        port.close()
    assert not port.streams._closers


def test_a_worker_has_a_few_streams_for_requests(cluster: Make, stack: ExitStack) -> None:
    servers = cluster(1, policy="async")
    server = servers.servers[0]
    with counter(servers.address, lanes="grpc") as client:
        hello = stream_pb2.StreamHello(
            format=3,
            job=server.identity.job,
            worker=client.worker,
            key=server.identity.worker_keys.key_of(client.worker),
            purpose=stream_pb2.StreamHello.PURPOSE_REQUESTS,
        ).SerializeToString()
        peers = []
        for _ in range(MAX_REQUEST_STREAMS + 1):
            peers.append(LightClient.unanswered(server.identity.stream_address, hello))
            stack.enter_context(peers[-1].sock)
            assert peers[-1].answer()[0] is FrameKind.WELCOME
        assert is_closed(peers[0].sock)
        peers[1].sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            peers[1].sock.recv(1)
