"""Streams: what a server refuses, and how a stream ends."""

import gc
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pscommon.core.errors import PSError
from pscommon.core.formats import WIRE_FORMAT
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.stream_format import HEAD_BYTES, MAGIC, FrameKind, decode_prefix, encode_frame
from psproto.v1 import parameter_server_pb2 as ps
from psproto.v1 import stream_pb2
from psproto.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from psproto.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from psserver.exchange.exchange import Exchange
from psserver.server import Server
from psserver.sockets import socket_port
from psworker import OptimizerSpec
from tests.support.cluster import Cluster
from tests.support.events import records_of
from tests.support.light_client import LightClient, join
from tests.support.stream_peers import close_all
from tests.support.stream_training import ONES, START, make_step, streams_of, train
from tests.support.workers import connected, until

Make = Callable[..., Cluster]


# ---- peers that are no workers -------------------------------------------------------------------


class Raw:
    """A connection to a server's stream port."""

    def __init__(self, server: Server) -> None:
        self._server = server
        host, _, port = server.identity.stream_address.rpartition(":")
        self.sock = socket.create_connection((host, int(port)), 10.0)

    def greet(self, **fields: Any) -> tuple[FrameKind, bytes]:
        """Send a hello; return the answer."""
        identity = self._server.identity
        usual = {"format": 3, "job": identity.job, "worker": 1}
        usual["key"] = identity.worker_keys.key_of(1)
        hello = stream_pb2.StreamHello(**{**usual, **fields})
        self.sock.sendall(MAGIC + encode_frame(FrameKind.HELLO, hello.SerializeToString()))
        assert self.receive(len(MAGIC)) == MAGIC
        return self.frame()

    def frame(self) -> tuple[FrameKind, bytes]:
        head = bytearray(self.receive(HEAD_BYTES))
        prefix = decode_prefix(head)
        return prefix.kind, prefix.message(head, bytearray(self.receive(prefix.rest_nbytes)))

    def receive(self, nbytes: int) -> bytes:
        found = b""
        while len(found) < nbytes:
            part = self.sock.recv(nbytes - len(found))
            if not part:
                raise EOFError(found)
            found += part
        return found

    def is_closed(self) -> bool:
        """Wait until the server closes the connection."""
        try:
            return not self.sock.recv(1)
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.sock.close()


HUGE = struct.pack("<BxxxIQQ", 1, 2**32 - 1, 2**63, 0).ljust(HEAD_BYTES)


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, MAGIC + b"\xff" * 128, MAGIC + HUGE],
    ids=["http", "zeros", "no frame", "an oversized length"],
)
def test_garbage_is_refused_in_one_line(
    cluster: Make, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    servers = cluster(1)
    for _ in range(3):
        with closing(Raw(servers.servers[0])) as raw:
            raw.sock.sendall(garbage)
            assert raw.is_closed()

    assert train(servers.address, "stream") == "tcp"
    assert len(records_of(caplog, "stream_refused")) == 1


def test_a_greeting_that_claims_a_large_message_is_refused_at_once(
    cluster: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server neither allocates memory for the message nor waits for it."""
    monkeypatch.setattr("psserver.sockets.worker_connection.HELLO_SECONDS", 600.0)
    servers = cluster(1)
    head = encode_frame(FrameKind.HELLO, bytes(1 << 20))[:HEAD_BYTES]
    with ExitStack() as stack:
        peers = [stack.enter_context(closing(Raw(servers.servers[0]))) for _ in range(50)]
        for raw in peers:
            raw.sock.sendall(MAGIC + head)

        assert train(servers.address, "stream") == "tcp"
        assert all(raw.is_closed() for raw in peers)
    (line,) = records_of(caplog, "stream_refused")
    assert f"message of {1 << 20} bytes" in line.getMessage()


@pytest.mark.parametrize("spoken", [None, 1, WIRE_FORMAT + 1])
def test_a_worker_of_another_format_is_refused(cluster: Make, spoken: int | None) -> None:
    with closing(Raw(cluster(1).servers[0])) as raw:
        assert raw.greet(format=spoken)[0] is FrameKind.ERROR


@pytest.mark.parametrize("nbytes", [0, 3, len(MAGIC), len(MAGIC) + 10])
def test_half_a_greeting_ends_with_the_connection(cluster: Make, nbytes: int) -> None:
    servers = cluster(1)
    with closing(Raw(servers.servers[0])) as raw:
        raw.sock.sendall((MAGIC + encode_frame(FrameKind.HELLO, b"x" * 50))[:nbytes])

    assert train(servers.address, "stream") == "tcp"


def test_silent_connections_delay_no_worker_and_are_closed(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psserver.sockets.worker_connection.HELLO_SECONDS", 1.0)
    servers = cluster(1)
    silent = [Raw(servers.servers[0]) for _ in range(1000)]

    assert train(servers.address, "stream") == "tcp"

    assert all(raw.is_closed() for raw in silent)
    for raw in silent:
        raw.close()


def test_a_newer_stream_of_a_worker_closes_the_older_one(cluster: Make) -> None:
    servers = cluster(1)
    until(lambda: bool(servers.servers[0].identity.job), "the job")
    with closing(Raw(servers.servers[0])) as older, closing(Raw(servers.servers[0])) as newer:
        assert older.greet()[0] is FrameKind.WELCOME
        assert newer.greet()[0] is FrameKind.WELCOME

        assert older.is_closed()


def test_the_unix_socket_belongs_to_its_user_and_is_removed(cluster: Make) -> None:
    made = cluster(1)
    path = Path(made.servers[0].identity.stream_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    made.close()

    assert not path.exists()


def test_only_sockets_of_killed_servers_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that starts has its socket before it accepts connections."""
    monkeypatch.setattr(socket_port, "FOLDER", tmp_path)
    path = tmp_path / "paramserver-1.sock"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        socket_port.remove_dead_paths()
        assert path.exists()

        monkeypatch.setattr(socket_port, "STARTING_SECONDS", 0.0)
        sock.listen()
        socket_port.remove_dead_paths()
        assert path.exists()
    socket_port.remove_dead_paths()
    assert not path.exists()


def test_a_bug_in_an_exchange_is_answered(
    cluster: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        monkeypatch.undo()
        raise ZeroDivisionError("planted")

    with connected(cluster(1).address, lanes="stream") as client:
        client.register(START, OptimizerSpec("sgd", lr=1.0))
        monkeypatch.setattr(Exchange, "_check_push", fail)
        with pytest.raises(PSError, match="ZeroDivisionError: planted"):
            client.push(ONES)
        assert client.push_pull(ONES).status == "applied"
    assert len(records_of(caplog, "rpc_failed")) == 1


def test_connections_that_come_while_the_server_ends_are_closed(cluster: Make) -> None:
    """A socket or task that the server leaves behind fails the test as an unraisable error."""
    made = cluster(1)
    ended, arrivals = threading.Event(), []

    def arrive() -> None:
        with suppress(OSError):
            while not ended.is_set():
                arrivals.append(Raw(made.servers[0]))

    visitor = threading.Thread(target=arrive)
    visitor.start()
    until(lambda: len(arrivals) > 20, "connections")
    made.close()
    ended.set()
    visitor.join()
    gc.collect()

    for raw in arrivals:
        assert raw.is_closed()
        raw.close()


def test_many_slow_uploads_occupy_no_thread_and_delay_no_worker(cluster: Make) -> None:
    """64 workers have sent a part of a push each."""
    address, floats, part = cluster(1, policy="async").address, 200_000, 100_000
    model = ModelSpec(
        (TensorSpec("w", (floats,), "float32"),), OptimizerSettings("sgd", ({"lr": 1.0},))
    )
    ones = np.ones(floats, np.float32)
    with ExitStack() as stack:
        worker = stack.enter_context(connected(address, lanes="stream"))
        worker.register({"w": np.zeros_like(ones)}, OptimizerSpec("sgd", lr=1.0))
        channel = stack.enter_context(closing(open_channel(Endpoint(address))))
        stub = CoordinatorServiceStub(channel)
        described = ParameterServerServiceStub(channel).Describe(ps.DescribeRequest())
        assert worker.push_pull({"w": ones}).status == "applied"
        clients, data = [], ones.tobytes()
        threads = threading.active_count()
        for _ in range(64):
            client = LightClient(join(stub, described.job, model), described.stream_address)
            stack.callback(client.sock.close)
            client.begin_push(1, len(data))
            kind, message, _ = client.answer()
            assert kind is FrameKind.GO, message
            client.sock.sendall(data[:part])
            clients.append(client)

        assert worker.push_pull({"w": ones}).status == "applied"
        assert threading.active_count() <= threads + 10  # gRPC's, for the joins

        for client in clients:
            client.sock.sendall(data[part:])
        outcomes = [ps.ExchangeResult.FromString(client.answer()[1]).outcome for client in clients]
        assert outcomes == [ps.OUTCOME_APPLIED] * 64
        worker.pull()
        assert float(worker.weights["w"][0]) == -66.0


# ---- lost connections ----------------------------------------------------------------------------


@pytest.mark.full
def test_a_push_whose_stream_is_lost_counts_once(cluster: Make) -> None:
    """The server closes every stream at some moment of 30 pushes."""
    servers = cluster(2, policy="async")
    with connected(servers.address, lanes="stream") as client:
        client.register(START, OptimizerSpec("sgd", lr=1.0))
        stop = threading.Event()

        def close_streams() -> None:
            while not stop.wait(0.013):
                for server in servers.servers:
                    close_all(server)

        thread = threading.Thread(target=close_streams)
        thread.start()
        try:
            for _ in range(30):
                assert client.push_pull(ONES).status == "applied"
        finally:
            stop.set()
            thread.join()
        assert float(client.weights["w"][0]) == -30.0
        assert client.version == 30
        budgets = [server.engine.traffic.budget for server in servers.servers]
        until(lambda: not any(budget.used for budget in budgets), "no bytes in flight")


def test_a_closed_client_ends_a_call_that_waits(cluster: Make) -> None:
    servers = cluster(1, min_workers=2)
    with connected(servers.address, lanes="stream") as other:
        client = connected(servers.address, lanes="stream")
        for each in (other, client):
            threading.Thread(target=_register, args=(each,), daemon=True).start()
        until(lambda: client.version == 0 and client.model._has_started, "the registration")
        until(lambda: other.model._has_started, "the registration")
        errors: list[BaseException] = []

        def push() -> None:
            try:
                client.push(ONES)
            except BaseException as error:
                errors.append(error)

        pushing = threading.Thread(target=push)
        pushing.start()
        until(lambda: bool(servers.servers[0].engine.live.state.staged), "a staged push")
        client.close()
        pushing.join(10.0)

        assert not pushing.is_alive()
        assert isinstance(errors[0], PSError)


def _register(client: Any) -> None:
    client.register(START, OptimizerSpec("sgd", lr=1.0))


# ---- forks ---------------------------------------------------------------------------------------


def test_a_fork_of_a_worker_leaves_its_streams_open(cluster: Make) -> None:
    servers = cluster(1)
    with connected(servers.address, lanes="stream") as client:
        make_step(client)
        (stream,) = streams_of(client)
        child = os.fork()
        if not child:
            os._exit(0 if stream._socket.fileno() == -1 else 1)

        assert os.waitpid(child, 0)[1] == 0
        assert client.push_pull(ONES).status == "applied"
        assert streams_of(client) == [stream]
