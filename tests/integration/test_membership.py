"""Workers that die, pause, join late or leave, and shards whose connection is cut."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pscommon.core.data_loop import LoopSpec
from pscommon.core.errors import TooFewWorkersError, WaitTimeoutError
from pscommon.core.log_entries import BatchKey
from pscommon.core.model_spec import OptimizerSettings
from pscommon.system.process_id import process_id
from pscommon.wire import messages as codec
from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.frames import FRAME_BYTES, NOTHING, Frame
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import parameter_server_pb2 as ps
from psproto.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from psserver.coordinator.executor import CommandExecutor
from psserver.coordinator.service import CoordinatorService
from psserver.process.config import ServerConfig
from psserver.server import Server
from psworker.client.client import Client
from psworker.connection.membership import WorkerMembership
from psworker.run.job_poller import JobObserver
from psworker.transport.exchange_calls import AnswerReceiver, Cancellation, ExchangeAnswer
from psworker.transport.grpc_transport import GrpcTransport
from tests.support.cluster import Cluster
from tests.support.events import records_of
from tests.support.metrics_scrape import Metrics
from tests.support.programs import Program, programs_in
from tests.support.wire_calls import sent_by
from tests.support.workers import (
    DEADLINE,
    ONES,
    OUTLIVED,
    connected,
    count,
    counted,
    counter,
    status,
    together,
    until,
    weights_of,
)

Make = Callable[..., Cluster]
LONG_LEASE = 2.0
"""Where a process has to start and send its first heartbeats on a busy machine."""

# Pushes until it is killed; after a fence it rejoins as a new worker.
WORKER = """
import sys, psworker
from tests.support.workers import ONES, counter
client = counter(sys.argv[1], rank=1)
try:
    while True:
        client.push(ONES)
        print("pushed", flush=True)
except psworker.FencedError as error:
    print("fenced:", error, flush=True)
with counter(sys.argv[1], rank=1) as again:
    print("back as", again.worker, flush=True)
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[[str], Program]]:
    """Start the process of a worker with rank 1, which trains against an address."""
    with programs_in(tmp_path) as programs:
        script = programs.script(WORKER)
        yield lambda address: programs.fork("python", script, address)


Start = Callable[[str], Program]


def member(address: str, rank: int) -> dict[str, Any]:
    """Return the newest worker of that rank from the status."""
    found: dict[str, Any] = [row for row in status(address)["workers"] if row["rank"] == rank][-1]
    return found


# ---- workers -------------------------------------------------------------------------------------


def test_a_killed_worker_is_dropped_and_the_others_continue(
    cluster: Make, worker: Start, caplog: pytest.LogCaptureFixture
) -> None:
    address = cluster(2, min_workers=2, lease=LONG_LEASE).address
    other = worker(address)
    with counter(address, rank=0) as client:
        count(client, 3)
        other.wait_for("pushed", times=3)

        other.send(signal.SIGKILL)
        count(client, 4)  # perhaps one more round of both workers, then rounds of one

        lost = member(address, rank=1)
        assert (lost["state"], lost["pid"]) == ("lost", other.pid)
        assert lost["reason"] == "its process has ended"
        assert member(address, rank=0)["state"] == "active"
    (record,) = until(lambda: records_of(caplog, "worker_lost"), "a line about it")
    assert (record.levelno, record.__dict__["worker"]) == (logging.WARNING, lost["worker"])


def test_the_parent_of_a_worker_may_report_its_end(cluster: Make, worker: Start) -> None:
    """As ps-run does: to the servers the worker is only silent."""
    address = cluster(2, min_workers=2, lease=10 * LONG_LEASE).address
    other = worker(address)
    with counter(address, rank=0) as client, closing(JobObserver(address)) as observer:
        count(client, 3)
        other.wait_for("pushed", times=3)
        other.send(signal.SIGSTOP)
        observer.report_exit(process_id(other.pid), "its process was killed by SIGKILL")
        count(client, 4)

        lost = member(address, rank=1)
        assert (lost["state"], lost["reason"]) == ("lost", "its process was killed by SIGKILL")


def test_a_suspended_worker_is_fenced_and_may_rejoin(cluster: Make, worker: Start) -> None:
    """Nothing that it sends afterwards counts."""
    address = cluster(1, policy="async", lease=LONG_LEASE).address
    other = worker(address)
    other.wait_for("pushed")
    other.send(signal.SIGSTOP)
    until(lambda: member(address, rank=1)["state"] == "lost", "a worker whose lease has ended")
    fenced, before = member(address, rank=1)["worker"], status(address)["steps"]

    other.send(signal.SIGCONT)

    assert "its lease ended" in other.wait_for("fenced:")
    assert other.wait() == 0, other.output
    assert status(address)["steps"] == before
    assert counted(weights_of(address)) == before
    back = member(address, rank=1)
    assert (back["state"], back["worker"] > fenced) == ("left", True)


def test_a_worker_that_computes_for_long_is_not_dropped(cluster: Make) -> None:
    """Its heartbeats renew the lease, whatever its script does meanwhile."""
    address = cluster(1, min_workers=2, lease=OUTLIVED).address

    def slow() -> None:
        with counter(address, rank=1) as client:
            count(client)
            threading.Event().wait(2 * OUTLIVED)  # the script makes no call
            count(client)

    def fast() -> None:
        with counter(address, rank=0) as client:
            count(client, 2)

    together(slow, fast)

    assert {row["state"] for row in status(address)["workers"]} == {"left"}
    assert status(address)["version"] == 2


class TricklingLane(GrpcTransport):
    """Sends data to shard `slow` one frame at a time, with pauses between."""

    slow = 0

    def exchange(
        self,
        shard: int,
        header: ps.PushPullHeader,
        send: Sequence[memoryview],
        receiver: AnswerReceiver,
        timeout: float,
        cancellation: Cancellation,
        frames: Iterator[Frame[ps.PushPullHeader]] | None = None,
    ) -> ExchangeAnswer:
        if shard == self.slow and header.has_data:
            frames = chain([Frame(header, NOTHING)], map(trickle, pieces(send)))
        return super().exchange(shard, header, send, receiver, timeout, cancellation, frames)


def pieces(send: Sequence[memoryview]) -> Iterator[Frame[ps.PushPullHeader]]:
    for view in send:
        for start in range(0, view.nbytes, FRAME_BYTES):
            yield Frame(None, view[start : start + FRAME_BYTES])


def trickle(frame: Frame[ps.PushPullHeader]) -> Frame[ps.PushPullHeader]:
    threading.Event().wait(0.2)
    return frame


@pytest.mark.full
@pytest.mark.parametrize("slow", [0, 1])
def test_a_worker_whose_bytes_move_is_not_dropped(
    cluster: Make, monkeypatch: pytest.MonkeyPatch, slow: int
) -> None:
    """No heartbeat may get through a full connection; a worker that sends neither is lost."""
    servers = cluster(2, lease=2.0, lanes="grpc")
    monkeypatch.setattr(WorkerMembership, "send_heartbeat", lambda place, *args: "")
    lane = TricklingLane(servers.addresses.split(","))
    lane.slow = slow
    with Client(lane=lane) as client:
        began = time.monotonic()
        client.register(
            {"w": np.zeros(8_000_000, np.float32)}, OptimizerSettings("sgd", ({"lr": 1.0},))
        )

        assert time.monotonic() - began > 3.0  # much longer than the lease
        assert member(servers.address, rank=0)["state"] == "active"
        until(
            lambda: member(servers.address, rank=0)["state"] == "lost",
            "a worker whose lease has ended",
        )


def test_a_server_measures_time_from_its_start(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suspension before its first tick would otherwise end valid leases."""
    ticks, tick = [], CoordinatorService.tick
    monkeypatch.setattr(CommandExecutor, "next_tick_seconds", lambda executor: 2 * DEADLINE)
    monkeypatch.setattr(
        CoordinatorService, "tick", lambda service: (tick(service), ticks.append(service))
    )
    servers = cluster(1)

    until(lambda: ticks == [servers.servers[0].service], "a first tick")


def test_batches_of_a_dead_worker_go_to_others(cluster: Make) -> None:
    """Every batch counts exactly once."""
    address, loop = cluster(2, lease=OUTLIVED).address, LoopSpec(0, size=20, batch_size=1)
    with counter(address) as client:
        delayed = silent_worker(address, client.job, codec.model_to_proto(client.plan.spec), loop)
        buffer, used = memoryview(bytearray(client.plan.nbytes)), []
        while not (lease := client.data.next_batches(loop, idle=True)).end:
            used += lease.numbers
            client.model.exchange(
                gradients=buffer,
                weights=None,
                batches=[BatchKey(0, number) for number in lease.numbers],
            )

    assert len(delayed) == 4
    assert sorted(used) == list(range(20))
    (row,) = status(address)["data"]
    assert (row["committed"], row["leased"], row["ended"]) == (20, 0, True)


def silent_worker(address: str, job: str, model: Any, loop: LoopSpec) -> list[int]:
    """Join as a worker that takes batches and stays silent; return the batches."""
    with closing(open_channel(Endpoint(address))) as channel:
        stub = CoordinatorServiceStub(channel)
        joined = stub.Join(co.JoinRequest(format=3, job=job), timeout=10)
        worker, own = joined.worker, sent_by(joined.key)
        register = co.RegisterRequest(job=job, worker=worker, model=model)
        stub.Register(register, timeout=10, metadata=own)
        request = co.NextBatchRequest(
            job=job, worker=worker, loop=codec.loop_to_proto(loop), count=4
        )
        return list(stub.NextBatch(request, timeout=10, metadata=own).numbers)


def test_a_late_worker_counts_from_its_registration(cluster: Make) -> None:
    address = cluster(2).address
    with counter(address, rank=0) as first:
        count(first, 3)
        with counter(address, rank=1) as second:
            assert counted(second.pull()) == 3
            together(lambda: count(first, 2), lambda: count(second, 2))
        count(first)  # without waiting for the worker that has left

    assert status(address)["version"] == 6
    assert [member(address, rank)["steps"] for rank in (0, 1)] == [6, 2]


def test_the_awaited_worker_is_shown_and_the_round_closes_when_it_leaves(cluster: Make) -> None:
    address = cluster(2, min_workers=2).address
    with (
        ThreadPoolExecutor(1) as pool,
        counter(address, rank=0) as quick,
        counter(address, rank=1) as late,
    ):
        pushing = pool.submit(quick.push, ONES)
        waiting = until(lambda: status(address)["waiting_for"], "the name of the awaited worker")

        late.leave("not today")

        assert f"worker {late.worker} (rank 1, " in waiting
        assert f" pid {os.getpid()}, step 0), silent for " in waiting
        assert pushing.result(30).status == "applied"
        assert member(address, rank=1)["reason"] == "not today"


def test_a_wait_timeout_names_the_late_worker(cluster: Make) -> None:
    address = cluster(1, min_workers=2).address
    with counter(address, rank=0, wait_timeout=0.3) as quick, counter(address, rank=1) as late:
        with pytest.raises(
            WaitTimeoutError, match=rf"waited .* for worker {late.worker} \(rank 1, "
        ) as caught:
            quick.push(ONES)

        assert caught.value.exit_code == 20


def test_absent_workers_are_not_awaited_forever(cluster: Make) -> None:
    address = cluster(1, min_workers=2, join_timeout=0.3).address
    with counter(address) as client:
        with pytest.raises(TooFewWorkersError, match=r"1 of --min-workers 2 are here") as caught:
            until(
                lambda: client.data.next_batches(LoopSpec(0, size=4, batch_size=1)).numbers,
                "a refusal",
            )

        assert caught.value.exit_code == 21


def test_one_address_leads_to_all_servers(cluster: Make) -> None:
    servers = cluster(3).servers

    for server in servers:
        with connected(server.address) as client:
            assert list(client.addresses) == [each.address for each in servers]


# ---- shards --------------------------------------------------------------------------------------


def test_a_restarted_shard_without_snapshots_ends_the_job(cluster: Make) -> None:
    servers = cluster(2)
    with counter(servers.address) as client:
        count(client)
    lost = servers.servers.pop()
    lost.close()

    servers.add(1, 2, bind=lost.address)

    leader = servers.servers[0]
    assert leader.ended.wait(30)
    assert leader.failure is not None
    assert (leader.failure.exit_code, leader.failure.reason) == (12, "NO_SNAPSHOT")
    assert "shard 1 was restarted" in str(leader.failure)


def test_a_late_end_of_an_old_connection_does_not_disconnect_the_shard() -> None:
    """One side may notice a cut long after the other has opened a new connection."""
    with closing(
        Server(ServerConfig(shards=2, bind="127.0.0.1:0", metrics_bind="127.0.0.1:0"))
    ) as leader:
        leader.start()
        config = ServerConfig(shard=1, shards=2, bind="127.0.0.1:0", join=leader.address)
        with (
            closing(Server(config)) as follower,
            closing(open_channel(Endpoint(leader.address))) as channel,
        ):
            blank, instance = co.Report(epoch=-1), follower.identity.instance
            me = co.LinkShardRequest(
                format=3,
                shard=1,
                shards=2,
                address=follower.address,
                instance=instance,
                report=blank,
            )
            hold = threading.Event()
            old = CoordinatorServiceStub(channel).LinkShard(_then_silent(me, hold))
            next(old)
            follower.start()
            until(lambda: follower.identity.job, "a shard that has connected again")

            old.cancel()
            hold.set()
            until(lambda: _ended_lines(leader) == 1, "the end of the old line")

            with counter(leader.address) as client:
                count(client, 2)
                assert counted(client.pull()) == 2


def _then_silent(
    request: co.LinkShardRequest, until_set: threading.Event
) -> Iterator[co.LinkShardRequest]:
    yield request
    until_set.wait(30)


def _ended_lines(server: Server) -> float:
    samples = Metrics(server.monitor.address).labels("ps_rpc_requests_total")
    return sum(sample["method"] == "LinkShard" for sample in samples)
