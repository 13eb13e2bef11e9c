"""Which server is reached over a stream, and why not."""

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import pytest

from pscommon.core.errors import (
    InvalidRequestError,
    MismatchError,
    TakenError,
    UnreachableError,
)
from tests.support.cluster import Cluster
from tests.support.events import records_of
from tests.support.stream_training import train

Make = Callable[..., Cluster]


@pytest.mark.parametrize(
    ("server", "worker", "reached"),
    [
        ("auto", "auto", "unix unix"),
        ("auto", "shm", "unix unix"),
        ("auto", "stream", "tcp tcp"),
        ("auto", "grpc", ""),
        ("shm", "auto", "unix unix"),
        ("stream", "auto", "tcp tcp"),
        ("grpc", "auto", ""),
    ],
)
def test_a_server_is_reached_over_the_best_lane_that_both_sides_allow(
    cluster: Make, server: str, worker: str, reached: str
) -> None:
    assert train(cluster(2, lanes=server).address, worker) == reached


@pytest.mark.parametrize("server", ["grpc", "shm"])
def test_a_worker_that_requires_streams_is_refused_where_the_server_forbids_them(
    cluster: Make, server: str
) -> None:
    with pytest.raises(InvalidRequestError, match=r"no stream port.*Try: `--lanes auto`") as caught:
        train(cluster(1, lanes=server).address, "stream")
    assert caught.value.exit_code == 2


def test_one_line_names_the_lanes_of_all_shards(
    cluster: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "psworker")
    servers = cluster(0)
    servers.add(0, 3)
    servers.add(1, 3, lanes="stream")
    servers.add(2, 3, lanes="grpc")

    train(servers.address, "auto")

    (line,) = records_of(caplog, "lanes_chosen")
    assert "unix=[0] tcp=[1] grpc=[2]" in line.getMessage()
    assert "no stream port" in line.getMessage()


class Peer(threading.Thread):
    """Listens on a port and sends the same bytes to everyone who says something."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(daemon=True)
        self._answer = answer
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.start()

    def run(self) -> None:
        with suppress(OSError):
            while True:
                with self._listening.accept()[0] as sock:
                    sock.recv(1 << 16)
                    sock.sendall(self._answer)

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.join()


@pytest.fixture
def http_server() -> Iterator[Peer]:
    with closing(Peer(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as peer:
        yield peer


def refused_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def wrong_address(case: str, cluster: Make, http_server: Peer) -> str:
    """Return an address that a server announces as its stream port although it is another one."""
    if case == "another job":
        return cluster(1, lanes="stream").servers[0].identity.stream_address
    return {"nothing": refused_address(), "an HTTP server": http_server.address}[case]


WRONG = {
    "nothing": (UnreachableError, "Connection refused.*--stream-bind"),
    "an HTTP server": (MismatchError, "no stream port of this software.*HTTP/1.1"),
    "another job": (MismatchError, "job"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_stream_address_leaves_grpc(
    cluster: Make, http_server: Peer, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "psworker")
    servers = cluster(1, lanes="stream")
    servers.servers[0].identity.stream_address = wrong_address(case, cluster, http_server)

    assert train(servers.address, "auto") == ""

    (line,) = records_of(caplog, "lanes_chosen")
    assert "grpc=[0]" in line.getMessage()


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_stream_address_ends_a_worker_that_requires_streams(
    cluster: Make, http_server: Peer, case: str
) -> None:
    servers = cluster(1, lanes="stream")
    servers.servers[0].identity.stream_address = wrong_address(case, cluster, http_server)
    error, text = WRONG[case]

    with pytest.raises(error, match=text):
        train(servers.address, "stream", connect_timeout=0.5)


def test_another_shard_is_refused(cluster: Make) -> None:
    servers = cluster(2, lanes="stream")
    first, second = servers.servers
    first.identity.stream_address = second.identity.stream_address

    with pytest.raises(MismatchError, match="this is shard 1, not shard 0"):
        train(servers.address, "stream")


def test_a_requested_port_that_is_taken_is_refused(cluster: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(TakenError, match="--stream-bind") as caught:
            cluster(1, stream_bind=address)
    assert caught.value.exit_code == 10


def test_the_default_port_is_replaced_if_it_is_taken(cluster: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        if port <= 2024:
            pytest.skip("the system gave a port without room below it")
        servers = cluster(1, bind=f"127.0.0.1:{port - 1000}")
        assert train(servers.address, "stream") == "tcp"


def test_a_server_listens_over_ipv6(cluster: Make) -> None:
    servers = cluster(1, bind="[::1]:0")

    assert servers.servers[0].identity.stream_address.startswith("[::1]:")
    assert train(servers.address, "stream") == "tcp"
