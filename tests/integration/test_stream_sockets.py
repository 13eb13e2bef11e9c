"""Sockets of streams: who may use the Unix socket, and the options of both ends of a connection."""

import os
import socket
from collections.abc import Callable

import pytest

from pscommon.wire import endpoint
from tests.support.cluster import Cluster
from tests.support.events import records_of
from tests.support.stream_training import make_step, streams_of, train
from tests.support.workers import connected

Make = Callable[..., Cluster]


def test_another_user_is_refused_at_the_unix_socket(
    cluster: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Several attempts give one line; TCP stays open to the worker."""
    monkeypatch.setattr(endpoint, "_uid_of", lambda sock: os.geteuid() + 1)
    servers = cluster(1)
    for _ in range(3):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10.0)
            sock.connect(servers.servers[0].identity.stream_path)
            assert sock.recv(1) == b""

    assert train(servers.address, "auto") == "tcp"
    (line,) = records_of(caplog, "stream_refused")
    assert "another user" in line.getMessage()


def test_the_user_of_a_peer_comes_from_the_kernel() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert endpoint._uid_of(one) == os.geteuid()


OPTIONS = {
    socket.TCP_USER_TIMEOUT: 4000,
    socket.TCP_KEEPIDLE: 1,
    socket.TCP_KEEPINTVL: 1,
    socket.TCP_KEEPCNT: 3,
}
"""A peer that is gone is noticed within 4 s, also on an idle connection."""


def test_both_ends_of_a_stream_notice_a_lost_peer(cluster: Make) -> None:
    servers = cluster(1)
    with connected(servers.address, lanes="stream") as client:
        make_step(client)
        (stream,) = streams_of(client)
        by_worker = servers.servers[0]._streams._port.streams._closers.values()
        closers = [close for streams in by_worker for close in streams]
        ends = [close.__self__._socket._socket for close in closers]  # type: ignore[attr-defined]
        found = [sock for sock in ends if sock.getpeername() == stream._socket.getsockname()]
        assert len(found) == 1

        for sock in (stream._socket, *found):
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
            for option, value in OPTIONS.items():
                assert sock.getsockopt(socket.IPPROTO_TCP, option) == value
