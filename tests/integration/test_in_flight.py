"""Bytes in flight are bounded: pushes wait fairly, nothing is lost, and memory stays flat."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest

from benchmarks.processes import memory_bytes
from pscommon.core.errors import InvalidRequestError, WaitTimeoutError
from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.frames import encode_data, encode_header
from pscommon.wire.requests import EXCHANGE_ONCE
from psproto.v1 import parameter_server_pb2 as ps
from psserver.shard.memory_budget import MemoryBudget
from psserver.waiting import ThreadWaiter, run
from psworker import Client, OptimizerSpec
from tests.support.cluster import Cluster
from tests.support.lanes import each_network_lane
from tests.support.programs import programs_in
from tests.support.wire_calls import Open, exchange, key_of, reason_of, sent_by, serve
from tests.support.workers import DEADLINE, connected, counted, together, until, weights_of

Make = Callable[..., Cluster]

PUSH = 4_000_000
ONE = {"w": np.ones(PUSH // 4, np.float32)}


def joined(address: str, lanes: Any = "grpc", **options: Any) -> Client:
    """Return a worker of a model of 4 MB that starts at zero and loses what is pushed."""
    client = connected(address, lanes=lanes, **options)
    client.register({"w": np.zeros(PUSH // 4, np.float32)}, OptimizerSpec("sgd", lr=1.0))
    return client


def budget_of(cluster: Cluster) -> MemoryBudget:
    return cluster.servers[0].engine.traffic.budget


# ---- 64 clients ----------------------------------------------------------------------------------

CLIENTS = 64
PUSHES = 448
GREATEST, GROWTH = 250e6, 100e6
"""Bytes by which the server's memory may grow in all, and in the second half over its peak in
the first.
"""


class CompetingClients:
    """Clients that push as fast as they can until there are PUSHES; memory: of process `pid`, after
    each.
    """

    def __init__(self, pid: int) -> None:
        self.made = [0] * CLIENTS
        self.memory: list[int] = []
        self._pid = pid
        self._lock = threading.Lock()
        self._start = threading.Barrier(CLIENTS)

    def run(self, client: Client, number: int) -> None:
        self._start.wait(DEADLINE)
        while sum(self.made) < PUSHES:
            assert client.push(ONE).status == "applied"
            with self._lock:
                self.made[number] += 1
                self.memory.append(memory_bytes(self._pid)["now"])


@pytest.mark.full
@each_network_lane
def test_64_clients_share_16_mb_and_none_starves(tmp_path: Path, lanes: str) -> None:
    """Each gets at least half of the mean, and the server holds a fraction of the 256 MB requested.
    Besides the bytes in flight, a server of 64 gRPC streams has gRPC's windows and frames, threads'
    stacks, and malloc's reserves.
    """
    with programs_in(tmp_path) as programs, ExitStack() as stack:
        server, address = serve(
            programs,
            programs.start,
            "--policy",
            "async",
            "--in-flight",
            "16MB",
            "--lanes",
            lanes,
            "--lease",
            "60s",
        )
        clients = [
            stack.enter_context(joined(address, lanes, wait_timeout=100.0)) for _ in range(CLIENTS)
        ]
        before, race = memory_bytes(server.pid)["now"], CompetingClients(server.pid)
        together(*[lambda n=n, c=c: race.run(c, n) for n, c in enumerate(clients)])

        assert counted(weights_of(address)) == sum(race.made) >= PUSHES
        assert min(race.made) >= sum(race.made) / CLIENTS / 2
        assert max(race.memory) - before < GREATEST
        half = len(race.memory) // 2
        assert max(race.memory[half:]) - max(race.memory[:half]) < GROWTH


# ---- waiting -------------------------------------------------------------------------------------


@pytest.fixture
def full(cluster: Make) -> Cluster:
    """Return a server with memory for two pushes, which tests take and release."""
    return cluster(1, policy="async", in_flight=8_000_000)


@each_network_lane
@pytest.mark.parametrize("request_of", ["push", "push_pull", "pull"])
def test_a_push_that_waits_too_long_fails_for_lack_of_memory(
    full: Cluster, request_of: str, lanes: str
) -> None:
    with joined(full.address, lanes), joined(full.address, lanes, wait_timeout=0.5) as client:
        calls: dict[str, Callable[[], object]] = {
            "push": lambda: client.push(ONE),
            "push_pull": lambda: client.push_pull(ONE),
            "pull": client.pull,
        }
        claim = run(budget_of(full).take(99, 5_000_000, DEADLINE, ThreadWaiter(), is_push=True))
        message = (
            r"5000000 of 8000000 bytes are in flight, no room for 4000000 more \(--in-flight\)"
        )
        with pytest.raises(WaitTimeoutError, match=message) as caught:
            calls[request_of]()
        assert caught.value.exit_code == 20
        budget_of(full).release(claim)
        calls[request_of]()

        assert counted(client.pull()) == (request_of != "pull")
    until(lambda: budget_of(full).used == 0, "everything given back")


@each_network_lane
def test_a_push_proceeds_when_memory_is_released(full: Cluster, lanes: str) -> None:
    with joined(full.address, lanes) as client:
        claim = run(budget_of(full).take(99, 8_000_000, DEADLINE, ThreadWaiter(), is_push=True))
        push = threading.Thread(target=client.push, args=(ONE,))
        push.start()
        until(lambda: budget_of(full).waiting, "a push that waits")
        assert full.servers[0].engine.live.version == 0
        budget_of(full).release(claim)
        push.join(DEADLINE)

        assert counted(client.pull()) == 1


def test_shared_memory_uses_no_bytes_in_flight(full: Cluster) -> None:
    with joined(full.address, lanes="shm", wait_timeout=5.0) as client:
        claim = run(budget_of(full).take(99, 8_000_000, DEADLINE, ThreadWaiter(), is_push=True))
        assert client.push_pull(ONE).status == "applied"
        budget_of(full).release(claim)

        assert counted(client.weights) == 1


def header(client: Client, **fields: Any) -> bytes:
    return encode_header(
        ps.PushPullHeader(
            job=client.job, worker=client.worker, pull=ps.PULL_NONE, wait_ms=100, **fields
        )
    )


@pytest.mark.parametrize("opened", [False, True])
def test_on_the_wire_a_full_budget_is_resource_exhausted_with_a_retry_time(
    full: Cluster,
    channel: Open,
    opened: bool,
) -> None:
    expected = ("RESOURCE_EXHAUSTED", "IN_FLIGHT", {"ErrorInfo", "RetryInfo"})
    with joined(full.address) as client:
        claim = run(budget_of(full).take(99, 8_000_000, DEADLINE, ThreadWaiter(), is_push=True))
        push = header(client, seq=1, has_data=True, samples=1, open=opened)
        with pytest.raises(grpc.RpcError) as streamed:
            list(exchange(channel(full.address), [push], key_of(client)))
        once: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel(full.address).unary_unary(
            EXCHANGE_ONCE.path
        )
        with pytest.raises(grpc.RpcError) as asked:
            once(push, timeout=DEADLINE, metadata=sent_by(key_of(client)))
        budget_of(full).release(claim)

        assert reason_of(streamed.value) == reason_of(asked.value) == expected


# ---- released bytes ------------------------------------------------------------------------------


def test_a_cancelled_call_releases_its_bytes(full: Cluster) -> None:
    """While it sends, and while it waits for memory itself."""
    budget, silent = budget_of(full), threading.Event()

    def frames(client: Client) -> Iterator[bytes]:
        yield header(client, seq=1, has_data=True, samples=1)
        yield encode_data(memoryview(bytes(1000)))
        silent.wait(DEADLINE)

    with joined(full.address) as client, closing(open_channel(Endpoint(full.address))) as raw:
        calls = [cast(Any, exchange(raw, frames(client), key_of(client))) for _ in range(3)]
        until(
            lambda: budget.used == 8_000_000 and budget.waiting == 1,
            "two that send and one that waits",
        )
        for call in calls:
            call.cancel()
        silent.set()
        until(lambda: (budget.used, budget.waiting) == (0, 0), "room")

        assert client.push(ONE).status == "applied"


def test_an_unread_pull_releases_its_bytes_when_it_is_cancelled(full: Cluster) -> None:
    """The caller's window does not grow: otherwise everything may be sent before it reads."""
    budget = budget_of(full)
    narrow = grpc.insecure_channel(full.address, options=[("grpc.http2.bdp_probe", 0)])
    with joined(full.address) as client, closing(narrow) as raw:
        pull = ps.PushPullHeader(
            job=client.job, worker=client.worker, pull=ps.PULL_STEP, wait_ms=1000
        )
        call = cast(Any, exchange(raw, [encode_header(pull)], key_of(client)))
        next(call)
        until(lambda: budget.used == PUSH, "a pull under way")
        call.cancel()

        until(lambda: budget.used == 0, "room")


@each_network_lane
def test_a_leaving_worker_releases_the_bytes_of_its_staged_push(cluster: Make, lanes: str) -> None:
    servers = cluster(1)
    with joined(servers.address, lanes):
        with joined(servers.address, lanes, wait_timeout=0.3) as client:
            with pytest.raises(WaitTimeoutError):
                client.push(ONE)
            assert budget_of(servers).used == PUSH

        until(lambda: budget_of(servers).used == 0, "room")


# ---- rounds --------------------------------------------------------------------------------------

ROUNDS = pytest.mark.parametrize(("policy", "staleness"), [("sync", None), ("ssp", 0), ("ssp", 2)])


@pytest.mark.every(5)
@each_network_lane
@ROUNDS
def test_a_worker_beyond_the_capacity_of_a_round_is_refused(
    cluster: Make, policy: str, staleness: int | None, lanes: str
) -> None:
    servers = cluster(1, policy=policy, staleness=staleness, in_flight=3 * PUSH - 1)
    with joined(servers.address, lanes) as one, joined(servers.address, lanes) as two:
        with pytest.raises(InvalidRequestError, match=f"`--in-flight {3 * PUSH}`") as caught:
            joined(servers.address, lanes)
        assert caught.value.exit_code == 2
        results = together(lambda: one.push(ONE), lambda: two.push(ONE))
        assert [result.status for result in results] == ["applied"] * 2
        two.close()
        with joined(servers.address, lanes) as three:
            assert {r.status for r in together(lambda: one.push(ONE), lambda: three.push(ONE))} == {
                "applied"
            }


@pytest.mark.every(5)
@each_network_lane
@ROUNDS
def test_rounds_need_no_more_than_the_computed_bytes(
    cluster: Make, policy: str, staleness: int | None, lanes: str
) -> None:
    servers = cluster(2, policy=policy, staleness=staleness, in_flight=3 * PUSH // 2, min_workers=3)
    clients = together(*[lambda: joined(servers.address, lanes) for _ in range(3)])

    def train(client: Client) -> None:
        with client:
            for _ in range(8):
                assert client.push_pull(ONE).status == "applied"

    together(*[lambda client=client: train(client) for client in clients])
    assert counted(weights_of(servers.address)) == (8 if staleness in (None, 0) else 24)


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_model_whose_push_never_fits_is_refused_at_registration(
    cluster: Make, policy: str
) -> None:
    servers = cluster(1, policy=policy, in_flight=PUSH - 1)

    with pytest.raises(InvalidRequestError, match=f"--in-flight {PUSH}"):
        joined(servers.address)
