"""Requests to the coordinator, and connections between servers, over streams."""

import logging
import threading
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from pscommon.core.errors import MismatchError
from pscommon.wire.blocking_socket import BlockingSocket
from pscommon.wire.endpoint import MAX_MESSAGE_BYTES
from pscommon.wire.stream_format import FrameKind, encode_frame
from psproto.v1 import stream_pb2
from psserver.peers.link_calls import GrpcLink, SocketLink
from psserver.process.handlers import Handlers
from psserver.sockets.worker_connection import WorkerConnection
from psworker import OptimizerSpec
from tests.support.cluster import Cluster
from tests.support.events import events
from tests.support.lanes import each_network_lane
from tests.support.stream_peers import close_all
from tests.support.stream_training import ONES, START
from tests.support.workers import (
    DEADLINE,
    connected,
    data,
    joined,
    network,
    status,
    together,
    until,
)

Make = Callable[..., Cluster]

PASSES = 3


def train(address: str, rank: int) -> list[float]:
    """Train with a loader; return the mean loss of all workers after each pass."""
    means: list[float] = []
    with joined(address, rank) as job:
        model = network()
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
        batches = job.batches(data(), batch_size=8, seed=3)
        for _ in range(PASSES):
            for x, y in batches:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            means.append(job.all_reduce({"loss": loss.item()}, samples=1)["loss"])
            job.barrier()
    return means


def number_of_steps() -> int:
    return PASSES * ((len(data()) + 7) // 8)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[str | None]:
    """Return the kinds of requests that come over streams, while they come."""
    found, answer = set(), WorkerConnection._answer

    async def recorded(self: WorkerConnection, handlers: Handlers, message: bytes) -> None:
        found.add(stream_pb2.CoordinatorRequest.FromString(message).WhichOneof("request"))
        await answer(self, handlers, message)

    monkeypatch.setattr(WorkerConnection, "_answer", recorded)
    return found


@pytest.mark.parametrize("lanes", ["auto", "shm", "stream", "grpc"])
def test_requests_use_a_stream_where_exchanges_do(
    cluster: Make, monkeypatch: pytest.MonkeyPatch, seen: set[str | None], lanes: str
) -> None:
    monkeypatch.setenv("PS_LANES", lanes)
    address = cluster(2, min_workers=2).address

    first, second = together(lambda: train(address, 0), lambda: train(address, 1))

    assert first == second
    used = {"next_batch", "collective"}
    assert seen & used == (set() if lanes == "grpc" else used)


def test_heartbeats_and_reports_use_a_stream(cluster: Make, seen: set[str | None]) -> None:
    with connected(cluster(1).address, lanes="stream") as client:
        client.register(START, OptimizerSpec("sgd", lr=1.0))
        client.push(ONES)

        until(lambda: "heartbeat" in seen, "a heartbeat")
        client.report(loss=1.0)
        client.send_reports()

    assert "report_metrics" in seen


def test_requests_use_a_stream_while_an_exchange_waits(
    cluster: Make, seen: set[str | None]
) -> None:
    servers = cluster(1, min_workers=2)
    address, machine = servers.address, servers.servers[0].engine.live.machine
    with connected(address, lanes="stream") as first, connected(address, lanes="stream") as other:
        sgd = OptimizerSpec("sgd", lr=1.0)
        together(lambda: first.register(START, sgd), lambda: other.register(START, sgd))
        push = threading.Thread(target=first.push, args=(ONES,))
        push.start()
        until(lambda: machine.staged, "a push that waits for the other worker")
        first.report(loss=1.0)
        first.send_reports()
        assert "report_metrics" in seen
        other.push(ONES)
        push.join(DEADLINE)

    assert not push.is_alive()


@pytest.mark.full
def test_lost_streams_lose_no_request(cluster: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers close all streams again and again; each batch counts once."""
    monkeypatch.setenv("PS_LANES", "stream")
    servers = cluster(2, policy="async")
    stop = threading.Event()

    def close_streams() -> None:
        while not stop.wait(0.02):
            for server in servers.servers:
                close_all(server)

    closing = threading.Thread(target=close_streams)
    closing.start()
    try:
        assert len(train(servers.address, 0)) == PASSES
    finally:
        stop.set()
        closing.join()
    assert status(servers.address)["version"] == number_of_steps()


# ---- connections between servers -----------------------------------------------------------------


def link_of(servers: Cluster) -> GrpcLink | SocketLink | None:
    link = servers.servers[1].coordinator_link
    assert link is not None
    return link._link


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        ("auto", "auto", "/"),
        ("stream", "auto", "127.0.0.1:"),
        ("auto", "stream", "127.0.0.1:"),
        ("shm", "auto", "/"),
        ("shm", "stream", ""),
        ("grpc", "auto", ""),
        ("auto", "grpc", ""),
    ],
)
def test_servers_are_connected_over_a_stream_where_both_allow_it(
    cluster: Make, first: str, second: str, kind: str
) -> None:
    """kind: Beginning of the stream's address; empty: gRPC."""
    servers = cluster(0)
    servers.add(0, 2, lanes=first)
    servers.add(1, 2, lanes=second)

    assert len(train(servers.address, 0)) == PASSES
    link = link_of(servers)
    if kind:
        assert isinstance(link, SocketLink)
        assert link.address.startswith(kind)
    else:
        assert isinstance(link, GrpcLink)


@each_network_lane
def test_a_lost_connection_between_servers_loses_no_update(cluster: Make, lanes: str) -> None:
    servers = cluster(2, policy="async", lanes=lanes)
    stop = threading.Event()

    def cancel_links() -> None:
        while not stop.wait(0.3):
            if (link := link_of(servers)) is not None:
                link.cancel()

    cancelling = threading.Thread(target=cancel_links)
    cancelling.start()
    try:
        assert len(train(servers.address, 0)) == PASSES
    finally:
        stop.set()
        cancelling.join()
    assert status(servers.address)["version"] == number_of_steps()


@each_network_lane
def test_a_shard_knows_an_intended_end_of_shard_0(
    cluster: Make, lanes: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    servers = cluster(2, lanes=lanes)
    assert len(train(servers.address, 0)) == PASSES
    first = servers.servers[0]

    first.stop("a signal")
    assert first.ended.wait(DEADLINE)
    first.close()

    until(lambda: "coordinator_stops" in events(caplog), "the shard's log line")
    assert events(caplog, logging.WARNING) == []


def test_only_shard_0_serves_other_shards(cluster: Make) -> None:
    servers = cluster(2, lanes="stream")
    until(lambda: bool(servers.servers[1].identity.job), "the job")
    hello = stream_pb2.StreamHello(purpose=stream_pb2.StreamHello.PURPOSE_SHARD, shard=1)

    with pytest.raises(MismatchError, match="only shard 0"):
        BlockingSocket.open(servers.servers[1].identity.stream_address, hello, "shard 1")


def test_a_message_that_is_too_long_ends_the_connection_of_a_shard(cluster: Make) -> None:
    servers = cluster(2, lanes="stream")
    hello = stream_pb2.StreamHello(purpose=stream_pb2.StreamHello.PURPOSE_SHARD)
    link = BlockingSocket.open(servers.servers[0].identity.stream_address, hello, "shard 0")
    link.send([encode_frame(FrameKind.LINK, data_nbytes=MAX_MESSAGE_BYTES + 1)])

    assert link.next_frame(None)[0].kind is FrameKind.ERROR
    with pytest.raises(OSError, match="closed"):
        link.next_frame(None)
    link.close()
