"""Memory that a server must not map, and descriptors that it must not keep."""

import fcntl
import gc
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import numpy as np
import pytest

from pscommon.core.errors import AuthenticationError, FencedError, InvalidRequestError, PSError
from pscommon.system.shared_memory import SharedRegion
from pscommon.wire.status import error_of
from pscommon.wire.stream_format import FrameKind, encode_frame
from psproto.v1 import parameter_server_pb2 as ps
from psserver.server import Server
from psserver.sockets.socket_exchange import _attach
from psworker import Client, OptimizerSpec
from tests.support.cluster import Cluster
from tests.support.shared_memory import mapped_count
from tests.support.stream_training import streams_of
from tests.support.workers import DEADLINE, connected, count, counted, counter, until

Make = Callable[..., Cluster]
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def opened() -> int:
    """Return how many descriptors of memory this process has, that of server and workers."""
    links = list[str]()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # another thread has closed it
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum("memfd:" in link for link in links)


def memfd(stack: ExitStack, nbytes: int, seals: int = SEALS) -> int:
    descriptor = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    stack.callback(os.close, descriptor)
    os.truncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def offer(client: Client, *descriptors: int, worker: int | None = None) -> PSError | None:
    """Offer descriptors over a worker's stream; return the server's error."""
    (connection,) = streams_of(client)
    worker = client.worker if worker is None else worker
    header = ps.PushPullHeader(job=client.job, worker=worker, memory=9)
    connection.send([encode_frame(FrameKind.MEMORY, header.SerializeToString(), 1)])
    assert isinstance(connection._socket, socket.socket)
    socket.send_fds(connection._socket, [b"\0"], list(descriptors))
    prefix, message = connection.next_frame(time.monotonic() + DEADLINE)
    assert prefix.kind in (FrameKind.RESULT, FrameKind.ERROR)
    return None if prefix.kind is FrameKind.RESULT else error_of(message, "the server")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


UNFIT: dict[str, tuple[Callable[[ExitStack, int], list[int]], str]] = {
    "no descriptor": (lambda stack, size: [], "not one descriptor came"),
    "two descriptors": (
        lambda stack, size: [memfd(stack, size), memfd(stack, size)],
        "not one descriptor came",
    ),
    "too small": (lambda stack, size: [memfd(stack, size - 1)], "bytes, not"),
    "too large": (lambda stack, size: [memfd(stack, size + 1)], "bytes, not"),
    "of one buffer": (lambda stack, size: [memfd(stack, size // 2)], "bytes, not"),
    "that can shrink": (
        lambda stack, size: [memfd(stack, size, SEALS & ~fcntl.F_SEAL_SHRINK)],
        "seals SHRINK, GROW and SEAL",
    ),
    "a socket": (
        lambda stack, size: [stack.enter_context(socket.socket()).fileno()],
        "seals SHRINK, GROW and SEAL",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_an_unfit_offer_is_refused_and_changes_nothing(
    case: str, cluster: Make, stack: ExitStack
) -> None:
    make, words = UNFIT[case]
    with counter(cluster(1).address, lanes="shm") as client:
        count(client)
        descriptors = make(stack, 2 * client.plan.nbytes)
        gc.collect()  # that of earlier tests
        before = mapped_count(), opened()
        error = offer(client, *descriptors)

        assert isinstance(error, InvalidRequestError)
        assert words in str(error)
        assert (mapped_count(), opened()) == before
        count(client)
        assert counted(client.pull()) == 2


def test_a_fit_offer_is_mapped_and_its_descriptor_is_closed(
    cluster: Make, stack: ExitStack
) -> None:
    made = cluster(1)
    with counter(made.address, lanes="shm") as client:
        count(client)
        descriptor = memfd(stack, 2 * client.plan.nbytes)
        before = opened()

        assert offer(client, descriptor) is None
        assert opened() == before
        buffers = made.servers[0].engine.traffic.shared_buffers._buffers[client.worker]
        assert buffers.number == 9
        os.pwrite(descriptor, b"x", 0)
        assert buffers.gradients.flat[0] == ord("x")


def test_a_worker_cannot_offer_memory_for_another_one(cluster: Make, stack: ExitStack) -> None:
    made = cluster(1, policy="async")
    with counter(made.address) as client, counter(made.address, lanes="shm") as other:
        count(other)
        error = offer(other, memfd(stack, 2 * other.plan.nbytes), worker=client.worker)

        assert isinstance(error, AuthenticationError)
        buffers = made.servers[0].engine.traffic.shared_buffers._buffers
        assert client.worker not in buffers or buffers[client.worker].number != 9


def attach(server: Server, worker: int) -> None:
    nbytes = 2 * server.engine.live.require_store().plan.nbytes
    region = SharedRegion(nbytes)
    header = ps.PushPullHeader(worker=worker, memory=1)
    _attach(server.engine, header, region.share())


def test_memory_of_a_worker_that_has_left_or_observes_is_not_mapped(cluster: Make) -> None:
    made = cluster(1)
    server = made.servers[0]
    with counter(made.address) as client:
        count(client)
        attach(server, client.worker)
    until(lambda: not server.engine.traffic.shared_buffers._buffers, "the worker has left")
    gc.collect()
    before = mapped_count()

    with pytest.raises(FencedError):
        attach(server, client.worker)
    with pytest.raises(InvalidRequestError, match="observer"):
        attach(server, 0)
    assert mapped_count() == before


def test_an_offer_over_tcp_is_refused(cluster: Make) -> None:
    with counter(cluster(1).address, lanes="stream") as client:
        (connection,) = streams_of(client)
        header = ps.PushPullHeader(job=client.job, worker=client.worker, memory=9)
        connection.send([encode_frame(FrameKind.MEMORY, header.SerializeToString(), 1), b"\0"])
        prefix, message = connection.next_frame(time.monotonic() + DEADLINE)

        assert prefix.kind is FrameKind.ERROR
        assert "not one descriptor came" in str(error_of(message, "the server"))
        count(client)


@pytest.mark.parametrize("where", ["head", "data", "head of an offer"])
def test_descriptors_with_other_bytes_are_dropped(
    where: str, cluster: Make, stack: ExitStack
) -> None:
    """The kernel closes them, because nothing asks for them there."""
    sizes = {"w": np.zeros(100, np.float32)}
    with connected(cluster(1).address, lanes="shm") as client:
        client.register(sizes, OptimizerSpec("sgd", lr=1.0))
        client.push_pull({"w": np.ones(100, np.float32)})
        (connection,) = streams_of(client)
        sock = connection._socket
        assert isinstance(sock, socket.socket)
        descriptors = [memfd(stack, 2 * client.plan.nbytes) for _ in range(3)]
        header = ps.PushPullHeader(job=client.job, worker=client.worker, pull=ps.PULL_NONE)
        kind = FrameKind.MEMORY if where == "head of an offer" else FrameKind.EXCHANGE
        data = b"\0" if kind is FrameKind.MEMORY else bytes(7)
        if kind is FrameKind.EXCHANGE:
            header.seq, header.has_data = 77, True
        before = opened()
        head = encode_frame(kind, header.SerializeToString(), len(data))
        socket.send_fds(sock, [head], [] if where == "data" else descriptors)
        socket.send_fds(sock, [data], descriptors if where == "data" else [])
        prefix, _ = connection.next_frame(time.monotonic() + DEADLINE)

        assert prefix.kind is FrameKind.ERROR
        assert opened() == before
        assert client.push_pull({"w": np.ones(100, np.float32)}).status == "applied"
