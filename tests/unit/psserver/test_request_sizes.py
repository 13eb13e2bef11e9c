"""Requests are bounded before anything is allocated; the length of a training costs nothing."""

import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from pscommon.core import limits
from pscommon.core.data_loop import LoopSpec
from pscommon.core.data_stream import StreamSpec
from pscommon.core.errors import InvalidRequestError
from pscommon.core.log_entries import BatchKey
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from pscommon.wire.messages import loop_from_proto, loop_to_proto
from psserver.core.commands.data_commands import LeaseBatches, ReportMetrics, ReturnBatches
from psserver.core.commands.request_checks import check_memory
from psserver.core.commands.worker_commands import Join
from psserver.core.job.policy import policy
from psworker.client.local_client import LocalClient
from tests.support.replayed_job import Job

MEGABYTE = 1 << 20
FOREVER = 10**9


@contextmanager
def bounded(nbytes: int, seconds: float) -> Iterator[None]:
    """Check that the body allocates and computes less than this."""
    tracemalloc.start()
    began = time.process_time()
    try:
        yield
        spent, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= nbytes
    assert spent <= seconds


def reason(call: Callable[[], object]) -> str:
    """Return the reason of the refusal."""
    with pytest.raises(InvalidRequestError) as caught:
        call()
    return caught.value.reason


def test_the_largest_batch_request_is_cheap_with_many_workers() -> None:
    """sync deals to all of them at once."""
    job = Job(policy("sync"), workers=16)
    asked = {"worker": job.workers[0], "spec": LoopSpec(0, 10**9, 1), "received": 0, "idle": False}

    with bounded(16 * MEGABYTE, 5.0):
        answer = job.recorder.do(
            LeaseBatches(count=limits.MAX_BATCHES_PER_REQUEST, **asked), job.now
        )
    assert len(answer.numbers) == limits.MAX_BATCHES_PER_REQUEST


def test_a_global_batch_of_too_many_batches_is_refused() -> None:
    job = Job(policy("sync"), global_batch=10**9)
    asked = {
        "worker": job.workers[0],
        "spec": LoopSpec(0, 10**9, 1),
        "received": 0,
        "count": 1,
        "idle": False,
    }

    with bounded(MEGABYTE, 0.5):
        assert reason(lambda: job.recorder.do(LeaseBatches(**asked), job.now)) == "OUT_OF_RANGE"


@pytest.mark.parametrize("spec", [LoopSpec(0, 60, 3, FOREVER), StreamSpec(1, 1000, 3, FOREVER)])
@pytest.mark.parametrize("name", ["sync", "async"])
def test_a_loop_over_a_thousand_million_epochs_costs_nothing(
    name: str, spec: LoopSpec | StreamSpec
) -> None:
    """Ledger, snapshot state and length are as those of a short loop."""
    job = Job(policy(name))

    with bounded(2 * MEGABYTE, 5.0):
        for _ in range(100):
            for worker in job.workers:
                job.step(worker, spec)
        job.coordinator.data.share(job.workers[0], spec)
        state = json.dumps(job.coordinator.ledger.state())
    assert job.coordinator.ledger.loops[spec.loop].committed == 200
    assert len(state) < 5000


def test_a_local_loop_over_a_thousand_million_epochs_costs_nothing() -> None:
    client, loop = LocalClient(), LoopSpec(0, 60, 3, FOREVER)

    with bounded(MEGABYTE, 1.0):
        numbers = [client.data.next_batches(loop, 2).numbers for _ in range(3)]
        client.data.return_batches([BatchKey(0, 4), BatchKey(0, 1)])
        numbers.append(client.data.next_batches(loop, 3).numbers)
    assert numbers == [(0, 1), (2, 3), (4, 5), (1, 4, 6)]


def test_a_local_loop_ends_with_its_last_batch() -> None:
    client, loop = LocalClient(), LoopSpec(0, 5, 2)

    assert client.data.next_batches(loop, 2).numbers == (0, 1)
    assert client.data.next_batches(loop, 2).numbers == (2,)
    assert client.data.next_batches(loop, 2).end


@pytest.mark.parametrize(
    "spec",
    [
        StreamSpec(0, sources=2**32 - 1, batch_size=1, epochs=2**32 - 1),
        StreamSpec(0, sources=20_000, batch_size=1, epochs=FOREVER),
        LoopSpec(0, size=2**64 - 1, batch_size=1, epochs=2),
    ],
)
def test_a_loop_with_unrepresentable_batch_numbers_is_refused(spec: LoopSpec | StreamSpec) -> None:
    """Batch numbers have 64 bits on the wire."""
    assert reason(lambda: loop_from_proto(loop_to_proto(spec))) == "OUT_OF_RANGE"


def test_a_loop_of_the_maximal_length_is_accepted() -> None:
    for spec in (StreamSpec(0, 2**14, 1, 2**30), LoopSpec(0, 2**32, 1, 2**31 - 1)):
        assert loop_from_proto(loop_to_proto(spec)) == spec


def test_many_returned_batches_are_looked_up_directly() -> None:
    """A batch that the worker does not hold costs no search through those that it holds."""
    job = Job(policy("async"))
    asked = {"worker": job.workers[0], "spec": LoopSpec(0, 10**9, 1), "idle": False}
    for received in range(0, 8 * 1024, 1024):
        job.recorder.do(LeaseBatches(received=received, count=1024, **asked), job.now)
    batches = [BatchKey(0, number) for number in range(limits.MAX_BATCHES_PER_PUSH)]

    with bounded(64 * MEGABYTE, 10.0):
        job.recorder.do(ReturnBatches(job.workers[0], batches), job.now)
    assert len(job.coordinator.ledger.loops[0].leases) == 0


@pytest.mark.parametrize("role", ["trainable", "frozen"])
def test_a_model_larger_than_the_memory_of_the_servers_is_refused(role: str) -> None:
    tensor = TensorSpec("w", (2**31, 2**31), "float64", role)  # type: ignore[arg-type]
    spec = ModelSpec((tensor,), OptimizerSettings("sgd"))

    assert reason(lambda: check_memory(spec, 2, 10**12)) == "OUT_OF_RANGE"


def test_a_worker_with_too_long_a_host_name_is_refused() -> None:
    join = Join(rank=None, host="h" * 257, pid=1, device="cpu")

    assert (
        reason(lambda: (job := Job(policy("async"))).recorder.do(join, job.now)) == "OUT_OF_RANGE"
    )


def test_the_names_of_reported_values_are_bounded() -> None:
    job = Job(policy("async"))
    worker = job.workers[0]

    def report(*names: str) -> None:
        job.recorder.do(ReportMetrics(worker, dict.fromkeys(names, 1.0)), job.now)

    report(*(f"value {number}" for number in range(limits.MAX_METRICS)))
    report("value 1")
    assert reason(lambda: report("one more")) == "OUT_OF_RANGE"
    assert reason(lambda: report("n" * 257)) == "OUT_OF_RANGE"
