"""Reported values of a real job: their history over heartbeats, snapshots, restarts and
rollbacks.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from pscommon.core.metric_row import MetricRow
from pscommon.wire.endpoint import Endpoint, open_channel
from psproto.v1 import coordinator_pb2 as co
from psproto.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from psworker import Job
from tests.support.cluster import Cluster
from tests.support.wire_calls import sent_by
from tests.support.workers import connected, count, counter, status, together, until

Make = Callable[..., Cluster]


def history(address: str) -> list[MetricRow]:
    with open_channel(Endpoint(address)) as channel:
        answer = CoordinatorServiceStub(channel).GetHistory(co.GetHistoryRequest(), timeout=10)
    return [
        MetricRow(row.time, row.version, row.worker, row.rank, row.name, row.value)
        for row in answer.rows
    ]


def values(address: str) -> list[tuple[int, str, float]]:
    return [(row.rank, row.name, row.value) for row in history(address)]


def test_heartbeats_carry_values_and_the_end_of_the_job_the_last_one(cluster: Make) -> None:
    address = cluster(2).address
    with counter(address, rank=0) as client:
        with Job(client) as job:
            job.report(loss=torch.tensor(3.0, requires_grad=True), accuracy=0.25)
            until(lambda: len(history(address)) == 2, "two rows")
            count(client)
            client.pull()
            job.report(loss=2.0)
            job.report(loss=1.0)
        rows = history(address)

    assert [(row.name, row.value, row.version) for row in rows if row.value != 2.0] == [
        ("accuracy", 0.25, 0),
        ("loss", 3.0, 0),
        ("loss", 1.0, 1),
    ]
    assert {(row.rank, row.worker) for row in rows} == {(0, 1)}
    assert status(address)["metrics"]["loss"] == 1.0


def test_a_failing_script_leaves_its_last_value(cluster: Make) -> None:
    address = cluster().address

    def script() -> None:
        with Job(counter(address, rank=0)) as job:
            job.report(loss=1.0)
            until(lambda: len(history(address)) == 1, "one row")
            job.report(loss=math.nan)
            raise ArithmeticError("the loss is NaN")

    with pytest.raises(ArithmeticError):
        script()
    assert str(values(address)) == "[(0, 'loss', 1.0), (0, 'loss', nan)]"
    assert status(address)["metrics"] == {"loss": None}


def test_immediate_reports_of_a_client_extend_the_history(cluster: Make) -> None:
    address = cluster().address
    with connected(address, rank=3) as client:
        client.report(loss=0.5)
        assert values(address) == [(3, "loss", 0.5)]


def test_values_beyond_the_bounds_are_dropped_and_heartbeats_continue(cluster: Make) -> None:
    """From a worker that does not check them itself."""
    address = cluster().address
    with open_channel(Endpoint(address)) as channel:
        stub = CoordinatorServiceStub(channel)
        joined = stub.Join(co.JoinRequest(format=3, rank=0), timeout=10)
        worker, own = joined.worker, sent_by(joined.key)
        for values in (
            [co.ReportedValue(name="x" * 300, value=1.0)],
            [co.ReportedValue(name=f"{number}", value=1.0) for number in range(1001)],
        ):
            beat = co.HeartbeatRequest(worker=worker, values=values)
            answer = stub.Heartbeat(beat, timeout=10, metadata=own)
            assert not answer.stopping
            with pytest.raises(grpc.RpcError) as caught:
                stub.ReportMetrics(
                    co.ReportMetricsRequest(worker=worker, values=values),
                    timeout=10,
                    metadata=own,
                )
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert history(address) == []
        aged = [
            co.ReportedValue(name=f"{age}", value=1.0, age_seconds=age)
            for age in (1e30, -5.0, math.nan)
        ]
        stub.Heartbeat(co.HeartbeatRequest(worker=worker, values=aged), timeout=10, metadata=own)

    times = [row.time for row in history(address)]
    assert len(times) == 3
    assert all(0.0 <= max(times) - time <= 61.0 for time in times)


DURABLE: dict[str, Any] = {"durability": "log", "log_fsync": "no"}


@pytest.mark.parametrize("durability", [DURABLE, {}], ids=["log", "snapshot"])
def test_the_history_survives_a_restart(
    cluster: Make, tmp_path: Path, durability: dict[str, Any]
) -> None:
    settings = {"data_dir": tmp_path, **durability}
    first = cluster(**settings)
    with counter(first.address, rank=0) as client:
        count(client)
        client.report(loss=1.0, bad=math.nan)
        if not durability:
            client.report(loss=1.0)
    before = history(first.address)
    first.close() if durability else first.stop()

    again = cluster(**settings)
    assert str(history(again.address)) == str(before)
    assert status(again.address)["metrics"] == {"bad": None, "loss": 1.0}
    with counter(again.address, rank=0) as client:
        count(client)
        client.report(loss=0.5)
    assert [row.value for row in history(again.address) if row.name == "loss"] == [1.0, 0.5]
    again.close() if durability else again.stop()
    assert len(history(cluster(**settings).address)) == 3  # a log of two segments


def test_the_history_rolls_back_with_the_weights(cluster: Make, tmp_path: Path) -> None:
    made = cluster(data_dir=tmp_path)
    assert made.servers[0].service is not None
    with counter(made.address, rank=0) as client:
        count(client)
        client.report(loss=1.0)
        made.servers[0].service.snapshot_scheduler.save(30.0)
        count(client)
        client.report(loss=0.5)
        assert [row.value for row in history(made.address)] == [1.0, 0.5]

        made.servers[0].service.restore(1, 30.0)

        assert [row.value for row in history(made.address)] == [1.0]


def test_the_reporting_worker_is_replaced_when_it_is_lost(cluster: Make) -> None:
    made = cluster(lease=0.5)
    with connected(made.address, rank=1) as second:
        with open_channel(Endpoint(made.address)) as channel:
            stub = CoordinatorServiceStub(channel)
            joined = stub.Join(co.JoinRequest(format=3, rank=0), timeout=10)
            stub.ReportMetrics(
                co.ReportMetricsRequest(worker=joined.worker, metrics={"loss": 1.0}),
                timeout=10,
                metadata=sent_by(joined.key),
            )
        second.report(loss=2.0)
        assert status(made.address)["metrics"] == {"loss": 1.0}
        until(
            lambda: [row["state"] for row in status(made.address)["workers"]] == ["lost", "joined"],
            "lost",
        )

        second.report(loss=3.0)

        assert status(made.address)["metrics"] == {"loss": 3.0}


def test_all_workers_agree_on_world_size_and_first_worker(cluster: Make) -> None:
    address = cluster(2, min_workers=3).address
    with ExitStack() as stack:
        clients = together(*[lambda rank=rank: counter(address, rank) for rank in (2, 0, 1)])  # type: ignore[misc]
        jobs = {
            rank: Job(stack.enter_context(client))
            for rank, client in zip((2, 0, 1), clients, strict=True)
        }
        until(lambda: [jobs[rank].workers for rank in range(3)] == [3, 3, 3], "three workers known")
        assert [jobs[rank].is_first for rank in range(3)] == [True, False, False]

        jobs[0].close()

        until(lambda: [jobs[rank].workers for rank in (1, 2)] == [2, 2], "two workers known")
        assert [jobs[rank].is_first for rank in (1, 2)] == [True, False]


def test_before_the_start_only_rank_0_is_first(cluster: Make) -> None:
    address = cluster(min_workers=2).address
    with connected(address, rank=1) as second, connected(address, rank=0) as first:
        assert (second.is_first, first.is_first) == (False, True)
        assert (second.workers, first.workers) == (2, 2)


def test_before_the_start_all_workers_have_the_awaited_world_size(cluster: Make) -> None:
    """A script reads it right after connect: before the others join, and before they register."""
    address = cluster(min_workers=2).address
    with ExitStack() as stack:
        clients = [stack.enter_context(connected(address, rank=rank)) for rank in range(3)]
        # the third one makes the job larger than awaited: the others learn it by a heartbeat
        assert [client.workers for client in clients[1:]] == [2, 3]
        until(lambda: [client.workers for client in clients] == [3, 3, 3], "three workers known")


def test_the_first_worker_of_a_new_run_has_the_awaited_world_size(
    cluster: Make, tmp_path: Path
) -> None:
    settings = {"min_workers": 2, "data_dir": tmp_path}
    servers = cluster(1, **settings)
    for client in together(*[lambda rank=rank: counter(servers.address, rank) for rank in (0, 1)]):  # type: ignore[misc]
        assert client.workers == 2
        client.close()
    servers.stop()

    with connected(cluster(1, **settings).address, rank=0) as client:
        assert client.workers == 2
