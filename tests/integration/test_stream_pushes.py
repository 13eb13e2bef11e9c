"""Pushes over streams, frame by frame: what is answered before a byte of a push is sent, which
memory a lost push leaves, and how many buffers a push may consist of.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest

from pscommon.core.errors import InFlightError, LayoutError, PSError
from pscommon.core.log_entries import PushKey
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.status import error_of
from pscommon.wire.stream_format import EAGER_BYTES, MAX_BUFFERS_COUNT, FrameKind
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import parameter_server_pb2 as ps
from psproto.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from psserver.server import Server
from psserver.shard.memory_budget import MemoryBudget
from psserver.waiting import ThreadWaiter, run
from psworker import OptimizerSpec
from tests.support.cluster import Cluster
from tests.support.light_client import LightClient, join
from tests.support.wire_calls import sent_by
from tests.support.workers import DEADLINE, connected, until

Make = Callable[..., Cluster]

FLOATS = 2_000_000
ONES = np.ones(FLOATS, np.float32)
DATA = ONES.tobytes()
PUSH = len(DATA)
MODEL = ModelSpec(
    (TensorSpec("w", (FLOATS,), "float32"),), OptimizerSettings("sgd", ({"lr": 1.0},))
)
assert PUSH > EAGER_BYTES


class PushJob:
    """A job of one server with a model; its workers are sockets.

    Attributes:
        server: The server.
        stub: Reaches its coordinator.
    """

    def __init__(self, server: Server, stub: CoordinatorServiceStub, stack: ExitStack) -> None:
        self.server, self.stub, self._stack = server, stub, stack

    @property
    def budget(self) -> MemoryBudget:
        return self.server.engine.traffic.budget

    @property
    def job(self) -> str:
        return self.server.identity.job

    def join(self) -> co.JoinResponse:
        """Return the answer to a new worker."""
        return join(self.stub, self.job, MODEL)

    def open(self, joined: co.JoinResponse) -> LightClient:
        """Return a new stream of a worker."""
        client = LightClient(joined, self.server.identity.stream_address)
        self._stack.callback(client.sock.close)
        return client

    def end(self, client: LightClient, joined: co.JoinResponse, how: str) -> LightClient | None:
        """Close a worker's stream (`lost`), or replace it by a newer one and return that."""
        if how == "replaced":
            return self.open(joined)
        client.sock.close()
        return None

    def push(self, client: LightClient, seq: int) -> None:
        """Make a complete push that counts."""
        client.begin_push(seq, PUSH)
        assert client.answer()[0] is FrameKind.GO
        client.sock.sendall(DATA)
        assert outcome(client) == ps.OUTCOME_APPLIED

    def weight(self) -> float:
        with connected(self.server.address, observe=True) as observer:
            return float(observer.pull()["w"][-1])


def outcome(client: LightClient) -> int:
    """Return the outcome that the next frame states."""
    kind, message, _ = client.answer()
    assert kind is FrameKind.RESULT, message
    return ps.ExchangeResult.FromString(message).outcome


def refusal(client: LightClient) -> PSError:
    """Return the error that the next frame states."""
    kind, message, _ = client.answer()
    assert kind is FrameKind.ERROR, kind
    return error_of(message, "the server")


@pytest.fixture
def job(cluster: Make) -> Iterator[PushJob]:
    """Yield a job whose server has memory for two pushes."""
    servers = cluster(1, policy="async", in_flight=2 * PUSH)
    with ExitStack() as stack:
        first = stack.enter_context(connected(servers.address, lanes="grpc"))
        first.register({"w": np.zeros_like(ONES)}, OptimizerSpec("sgd", lr=1.0))
        channel = stack.enter_context(closing(open_channel(Endpoint(servers.address))))
        yield PushJob(servers.servers[0], CoordinatorServiceStub(channel), stack)


# ---- before the data are sent --------------------------------------------------------------------


@pytest.mark.parametrize("opened", [False, True])
def test_a_fenced_worker_is_refused_before_it_sends_a_push(job: PushJob, opened: bool) -> None:
    client = job.open(joined := job.join())
    job.push(client, 1)
    leave, worker = co.LeaveRequest(job=job.job, worker=joined.worker), joined.worker
    job.stub.Leave(leave, timeout=10, metadata=sent_by(joined.key))
    machine = job.server.engine.live.machine
    until(lambda: machine.outcome(PushKey(worker, 2)) is not None, "the end of the membership")

    client.begin_push(2, 0 if opened else PUSH, open=opened)

    assert refusal(client).reason == "FENCED"
    assert job.weight() == -1.0


def test_a_push_that_has_counted_is_answered_before_it_is_sent_again(job: PushJob) -> None:
    client = job.open(job.join())
    job.push(client, 1)

    client.begin_push(1, PUSH)

    assert outcome(client) == ps.OUTCOME_DUPLICATE
    job.push(client, 2)
    assert job.weight() == -2.0


def test_a_push_for_another_number_of_shards_is_refused_before_it_is_sent(job: PushJob) -> None:
    client = job.open(job.join())

    client.begin_push(1, PUSH, shards=2)

    assert isinstance(refusal(client), LayoutError)
    job.push(client, 1)
    assert job.weight() == -1.0


def test_a_push_of_another_size_is_refused_before_it_is_sent(job: PushJob) -> None:
    client = job.open(job.join())

    client.begin_push(1, PUSH + 4)

    assert refusal(client).reason == "INVALID_REQUEST"
    job.push(client, 1)
    assert job.weight() == -1.0


@pytest.mark.parametrize("opened", [False, True])
def test_a_push_without_free_memory_is_refused_before_it_is_sent(
    job: PushJob, opened: bool
) -> None:
    client = job.open(job.join())
    claim = run(job.budget.take(99, 2 * PUSH, DEADLINE, ThreadWaiter(), is_push=True))

    client.begin_push(1, 0 if opened else PUSH, wait_ms=100, open=opened)

    assert isinstance(refusal(client), InFlightError)
    job.budget.release(claim)
    job.push(client, 1)
    assert job.weight() == -1.0


def test_a_push_is_sent_as_soon_as_memory_is_free(job: PushJob) -> None:
    client = job.open(job.join())
    claim = run(job.budget.take(99, 2 * PUSH, DEADLINE, ThreadWaiter(), is_push=True))

    client.begin_push(1, PUSH)

    until(lambda: job.budget.waiting, "a push that waits")
    client.sock.setblocking(False)
    with pytest.raises(BlockingIOError):  # signs of life at most
        client.answer()
    client.sock.setblocking(True)
    job.budget.release(claim)
    assert client.answer()[0] is FrameKind.GO
    client.sock.sendall(DATA)
    assert outcome(client) == ps.OUTCOME_APPLIED


# ---- memory of lost pushes -----------------------------------------------------------------------


@pytest.mark.parametrize("end", ["lost", "replaced"])
@pytest.mark.parametrize("sent", [0, PUSH // 2])
def test_a_push_that_ends_midway_leaves_no_bytes_in_flight(
    job: PushJob, end: str, sent: int
) -> None:
    client = job.open(joined := job.join())
    client.begin_push(1, PUSH)
    assert client.answer()[0] is FrameKind.GO
    client.sock.sendall(DATA[:sent])
    assert job.budget.used == PUSH

    newer = job.end(client, joined, end)

    until(lambda: job.budget.used == 0, "memory given back")
    job.push(newer or job.open(joined), 1)
    assert job.weight() == -1.0


@pytest.mark.parametrize("end", ["lost", "replaced"])
def test_a_push_that_ends_while_it_waits_for_memory_waits_no_more(job: PushJob, end: str) -> None:
    client = job.open(joined := job.join())
    claim = run(job.budget.take(99, 2 * PUSH, DEADLINE, ThreadWaiter(), is_push=True))
    client.begin_push(1, PUSH)
    until(lambda: job.budget.waiting, "a push that waits")

    newer = job.end(client, joined, end)

    until(lambda: not job.budget.waiting, "no push that waits")
    job.budget.release(claim)
    assert job.budget.used == 0
    job.push(newer or job.open(joined), 1)


@pytest.mark.parametrize("end", ["lost", "replaced"])
def test_a_pull_that_is_not_read_and_ends_leaves_no_bytes_in_flight(job: PushJob, end: str) -> None:
    client = job.open(joined := job.join())
    client.begin_push(0, 0, has_data=False, samples=0)
    until(lambda: job.budget.used == PUSH, "a pull that is being sent")

    newer = job.end(client, joined, end)

    until(lambda: job.budget.used == 0, "memory given back")
    job.push(newer or job.open(joined), 1)


# ---- many buffers --------------------------------------------------------------------------------

ARRAYS = 1500
SMALL = 100
assert ARRAYS > MAX_BUFFERS_COUNT


@pytest.mark.parametrize("absent", [False, True], ids=["all gradients", "every second gradient"])
def test_pushes_and_pulls_have_more_buffers_than_one_system_call_takes(
    cluster: Make, monkeypatch: pytest.MonkeyPatch, absent: bool
) -> None:
    """Arrays so small that more than 1024 fit in one piece are used in place, too."""
    monkeypatch.setattr("psworker.client.arrays.MIN_DIRECT_BYTES", 1)
    count = 2 * ARRAYS if absent else ARRAYS
    names = [f"w{number:04}" for number in range(count)]
    values = {name: np.float32(1 + number) for number, name in enumerate(names)}
    start: dict[str, Any] = {name: np.zeros(SMALL, np.float32) for name in names}
    pushed = names[::2] if absent else names
    grads: dict[str, Any] = {name: np.full(SMALL, values[name], np.float32) for name in pushed}
    out: dict[str, Any] = {name: np.full(SMALL, np.nan, np.float32) for name in names}
    with connected(cluster(1).address, lanes="stream") as client:
        client.register(start, OptimizerSpec("sgd", lr=1.0))
        for steps in (1, 2):
            assert client.push_pull(grads, out=out).status == "applied"
            for name in names:
                expected = -steps * values[name] if name in grads else 0.0
                assert (out[name] == expected).all(), name
            out[names[0]][:] = np.nan
        client.pull(out)
        for name in names:
            assert (out[name] == (-2 * values[name] if name in grads else 0.0)).all(), name
