"""Which server is reached over a stream, and why not."""

import logging
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from pscommon.core.errors import (
    FormatError,
    InvalidRequestError,
    MismatchError,
    TakenError,
    UnreachableError,
)
from pscommon.core.formats import WIRE_FORMAT
from pscommon.wire.stream_format import HEAD_BYTES, MAGIC, FrameKind, encode_frame
from psproto.v1 import stream_pb2
from psworker import OptimizerSpec
from tests.support.cluster import Cluster
from tests.support.events import records_of
from tests.support.ports import free_port_below
from tests.support.stream_peers import Peer
from tests.support.stream_training import ONES, START, streams_of, train
from tests.support.workers import DEADLINE, connected, until

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
    assert "no stream port: it offers grpc" in line.getMessage()


def refused_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


ANSWERS = {
    "a silent port": b"",
    "an HTTP server": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "another release": b"PSstrm02",
    "a newer format": MAGIC
    + encode_frame(
        FrameKind.WELCOME, stream_pb2.StreamWelcome(format=WIRE_FORMAT + 1).SerializeToString()
    ),
    "no frame": MAGIC + b"\xff" * HEAD_BYTES,
}

WRONG = {
    "nothing": (
        UnreachableError,
        20,
        "Connection refused.*Try: .*--stream-bind.*`--lanes auto`",
    ),
    "a silent port": (
        UnreachableError,
        20,
        "no bytes for.*Try: .*--stream-bind.*`--lanes auto`",
    ),
    "an HTTP server": (MismatchError, 11, "no stream port.*HTTP/1.1.*Try: .*--advertise-stream"),
    "another job": (MismatchError, 11, "job.*Try: .*--advertise-stream"),
    "another shard": (MismatchError, 11, "this is shard 1, not shard 0.*Try: .*--advertise-stream"),
    "another release": (MismatchError, 11, "another release.*PSstrm02.*Try: the same release"),
    "a newer format": (FormatError, 11, "message format 4.*Try: install the newer release"),
    "no frame": (MismatchError, 11, "another release.*not a frame.*Try: the same release"),
}


@pytest.fixture
def misled(cluster: Make, request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield the address of two servers. The first one announces another peer's stream port."""
    case, servers = request.param, cluster(2, lanes="stream")
    first, second = servers.servers
    until(lambda: bool(second.identity.job), "both servers know their job")
    with ExitStack() as stack:
        if case in ANSWERS:
            address = stack.enter_context(closing(Peer(ANSWERS[case]))).address
        elif case == "another job":
            address = cluster(1, lanes="stream").servers[0].identity.stream_address
        elif case == "another shard":
            address = second.identity.stream_address
        else:
            address = refused_address()
        first.identity.stream_address = address
        yield servers.address


@pytest.mark.parametrize("misled", WRONG, indirect=True)
def test_a_wrong_stream_address_leaves_grpc(misled: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "psworker")

    assert train(misled, "auto") == "tcp"

    (line,) = records_of(caplog, "lanes_chosen")
    assert "tcp=[1] grpc=[0]" in line.getMessage()
    assert "Try: " in line.getMessage()


@pytest.mark.parametrize(
    ("misled", "case"), [(case, case) for case in WRONG], indirect=["misled"], ids=list(WRONG)
)
def test_a_wrong_stream_address_ends_a_worker_that_requires_streams(misled: str, case: str) -> None:
    error, exit_code, text = WRONG[case]

    with pytest.raises(error, match=text) as caught:
        train(misled, "stream", connect_timeout=0.5)

    assert caught.value.exit_code == exit_code
    assert "127.0.0.1" in str(caught.value)


@pytest.mark.full
@pytest.mark.parametrize(
    ("answer", "pace"), [(b"", 0.0), (MAGIC, 0.7)], ids=["silent", "byte by byte"]
)
def test_a_port_that_does_not_answer_delays_the_first_step_by_2_seconds(
    cluster: Make, answer: bytes, pace: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "psworker")
    servers = cluster(1, lanes="stream")

    with closing(Peer(answer, pace)) as peer:
        servers.servers[0].identity.stream_address = peer.address
        started = time.monotonic()
        assert train(servers.address, "auto") == ""
        seconds = time.monotonic() - started

    assert peer.connections == 1
    assert seconds < 4.0
    (line,) = records_of(caplog, "lanes_chosen")
    assert "grpc=[0]" in line.getMessage()


@pytest.mark.full
def test_ports_that_do_not_answer_are_tried_at_the_same_time(
    cluster: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "psworker")
    servers = cluster(2, lanes="stream")

    with closing(Peer()) as first, closing(Peer()) as second, ThreadPoolExecutor(1) as pool:
        for server, peer in zip(servers.servers, (first, second), strict=True):
            server.identity.stream_address = peer.address
        started = time.monotonic()
        training = pool.submit(train, servers.address, "auto")
        until(lambda: first.is_connected and second.is_connected, "both ports are tried")
        assert training.result(DEADLINE) == ""
        assert time.monotonic() - started < 4.0

    (line,) = records_of(caplog, "lanes_chosen")
    assert "grpc=[0, 1]" in line.getMessage()


@pytest.mark.parametrize("is_lost", [False, True], ids=["dead at the start", "lost"])
def test_exchanges_return_to_a_stream_that_answers_again(
    cluster: Make,
    is_lost: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("psworker.transport.socket_pool.RETRY_SECONDS", 0.05)
    caplog.set_level(logging.INFO, "psworker")
    servers = cluster(1, lanes="stream")
    identity = servers.servers[0].identity
    answering, dead = identity.stream_address, refused_address()

    def lanes() -> list[str]:
        lines = [line.getMessage() for line in records_of(caplog, "lanes_chosen")]
        return [name for line in lines for name in ("tcp", "grpc") if f"{name}=[0]" in line]

    with connected(servers.address, lanes="auto") as client:
        if not is_lost:
            identity.stream_address = dead
        client.register(START, OptimizerSpec("sgd", lr=1.0))
        if is_lost:
            identity.stream_address = dead
            streams_of(client)[0].cancel()
        client.push_pull(ONES)
        identity.stream_address = answering
        until(lambda: client.push_pull(ONES).status == "applied" and streams_of(client), "a stream")
        client.push_pull(ONES)
        assert float(client.weights["w"][-1]) == -client.version

    assert lanes() == (["tcp"] if is_lost else []) + ["grpc", "tcp"]


def test_a_requested_port_that_is_taken_is_refused(cluster: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(TakenError, match="--stream-bind") as caught:
            cluster(1, stream_bind=address)
    assert caught.value.exit_code == 10


def test_the_default_port_is_replaced_if_it_is_taken(cluster: Make) -> None:
    port = free_port_below(1000)
    with socket.create_server(("127.0.0.1", port + 1000)):
        servers = cluster(1, bind=f"127.0.0.1:{port}")
        assert not servers.servers[0].identity.stream_address.endswith(f":{port + 1000}")
        assert train(servers.address, "stream") == "tcp"


def test_a_server_listens_over_ipv6(cluster: Make) -> None:
    servers = cluster(1, bind="[::1]:0")

    assert servers.servers[0].identity.stream_address.startswith("[::1]:")
    assert train(servers.address, "stream") == "tcp"
