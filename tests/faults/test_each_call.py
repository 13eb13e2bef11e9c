"""Requests and replies of each worker call are lost or repeated; counted pushes stay the same."""

from collections.abc import Iterator

import numpy as np
import pytest

from pscommon.core.data_loop import LoopSpec
from pscommon.core.log_entries import BatchKey
from pscommon.settings.values import Lanes
from pscommon.wire.requests import (
    DESCRIBE,
    EXCHANGE,
    EXCHANGE_ONCE,
    GET_HISTORY,
    GET_TRACE,
    INTRODUCE,
    REDUCE,
    REQUESTS,
    STREAM_FIELDS,
)
from psworker import Client
from psworker.core.results import CollectiveCall
from psworker.transport.grpc_transport import GrpcTransport
from tests.support.exactly_once import POLICIES
from tests.support.forked_job import ForkedJob
from tests.support.rpc_faults import Fault, FaultyLane, faulty_lane
from tests.support.worker_scripts import count
from tests.support.workers import counted, counter, status, until, weights_of

BATCHES = 3
FAULTS: dict[Fault, str] = {
    "request lost": "100%:0%",
    "reply lost": "0%:100%",
    "duplicate": "0%:0%:100%",
}
TIMES = {"CoordinatorService.Leave": 1, "CoordinatorService.Heartbeat": 1}
"""Number of consecutive faults, by default two. Leave is called once, Heartbeat rarely."""

METHODS = [
    str(row)
    for row in REQUESTS
    if row.role in ("worker", "read")
    and row not in (DESCRIBE, INTRODUCE, EXCHANGE_ONCE, GET_HISTORY, GET_TRACE, REDUCE)
]
"""Calls of workers that have joined. Each exchange counts as one call. Only ps-ctl calls GetTrace,
and only workers under allreduce call Reduce (test_allreduce.py).
"""

ON_STREAMS = [str(row) for row in (*STREAM_FIELDS, EXCHANGE)]
"""Calls that workers make over streams."""


@pytest.fixture(scope="module", params=POLICIES)
def job(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ForkedJob]:
    """Yield a job with two servers; its workers are clients in the test's process."""
    flags = (*POLICIES[request.param], "--lease", "2s")
    with ForkedJob(tmp_path_factory.mktemp(request.param), 2, flags, count) as job:
        job.start("s0", "s1")
        with counter(job.address, connect_timeout=30.0):
            pass  # registers the model and its weights
        yield job


def make_every_call(client: Client) -> None:
    """Run a small loop with one push per batch; return one batch and lease it again."""
    loops = client.status()["data"]
    loop = LoopSpec(loops[-1]["loop"] + 1 if loops else 0, BATCHES, 1)
    first, *rest = client.data.next_batches(loop, 2).numbers
    client.data.return_batches([BatchKey(loop.loop, number) for number in rest])
    push(client, loop, first)
    for _ in range(BATCHES - 1):
        push(client, loop, *client.data.next_batches(loop, idle=True).numbers)
    given = CollectiveCall("all_reduce", {"loss": 1.0})
    assert client.collective(1, given, loop.loop).values == {"loss": 1.0}
    client.report(loss=1.0)
    assert client.status()["policy"]


def push(client: Client, loop: LoopSpec, number: int) -> None:
    gradients = client.model.flat_buffers()[0]
    np.frombuffer(gradients, np.float32)[:] = 1.0
    assert (
        client.model.exchange(
            gradients=gradients, weights=None, batches=[BatchKey(loop.loop, number)]
        ).status
        == "applied"
    )


def run_worker_with_faults(job: ForkedJob, method: str, fault: Fault, lanes: Lanes) -> FaultyLane:
    """Run one worker whose first calls of this method meet this fault.

    lanes: `grpc` beside shared memory, or `stream`.
    """
    times = TIMES.get(method, 2)
    lane = faulty_lane(job.address, f"{method}={times}:{FAULTS[fault]}", lanes=lanes)
    memory: Lanes = "auto" if lanes == "grpc" else lanes
    with counter("", lane=lane, lanes=memory, connect_timeout=30.0) as client:
        make_every_call(client)
        assert isinstance(lane.lane, GrpcTransport)
        assert len(lane.lane._sockets._connections) == (2 if lanes == "stream" else 0)
        if method == "CoordinatorService.Heartbeat":
            until(lambda: lane.faults.counts[method, fault], f"{method}: {fault}")
    return lane


@pytest.mark.parametrize(
    ("lanes", "method"),
    [*(("grpc", method) for method in METHODS), *(("stream", method) for method in ON_STREAMS)],
)
def test_faulty_calls_count_each_push_and_batch_once(
    job: ForkedJob, lanes: Lanes, method: str
) -> None:
    for fault in FAULTS:
        before = counted(weights_of(job.address))
        lane = run_worker_with_faults(job, method, fault, lanes)

        assert lane.faults.counts[method, fault]
        assert counted(weights_of(job.address)) == before + BATCHES
        *_, row = status(job.address)["data"]
        assert (row["committed"], row["dropped"], row["duplicates"]) == (BATCHES, 0, 0)
