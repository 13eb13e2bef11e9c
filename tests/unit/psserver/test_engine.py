"""The engine of one shard: answers to waiting requests, and whether work is quick."""

import pytest
from prometheus_client import CollectorRegistry

from pscommon.core.errors import UnreachableError
from pscommon.core.log_entries import Begin, Evict, PushKey, Reject, Staged
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from pscommon.system.shared_memory import SharedRegion
from pscommon.system.thread_team import ALONE
from psproto.v1 import parameter_server_pb2 as pb
from psserver.durability.shard_state import ShardState
from psserver.process.metrics import ServerMetrics
from psserver.shard.engine import ShardEngine
from psserver.shard.worker_traffic import WorkerBuffers, WorkerTraffic
from tests.support.coordinators import SilentCoordinator, no_snapshot

SPEC = ModelSpec((TensorSpec("w", (4,), "float32"),), OptimizerSettings("sgd", ({"lr": 1.0},)))


def following(log_id: int) -> ShardState:
    """Return the state of an only shard that follows a new log."""
    state = ShardState(0, 1, ALONE)
    state.machine.follow(log_id, 0)
    return state


@pytest.fixture
def engine() -> ShardEngine:
    """An engine with weights."""
    metrics = ServerMetrics(CollectorRegistry(), shard=0)
    traffic = WorkerTraffic(metrics, 1 << 20, "auto")
    engine = ShardEngine(following(1), traffic, no_snapshot, SilentCoordinator())
    engine.set_model(SPEC)
    stage(engine, 0)
    engine.deliver(1, [Begin(1, 1)])
    return engine


def stage(engine: ShardEngine, seq: int) -> PushKey:
    key = PushKey(1, seq)
    engine.stage_push(
        Staged(key, 1, 0), engine.live.require_store().allocate_staging(initial=seq == 0)
    )
    return key


def test_the_push_that_ends_the_job_is_answered(engine: ShardEngine) -> None:
    """A server may stop faster than its answer is sent: the caller must get the reason."""
    bad, open_one = stage(engine, 1), stage(engine, 2)
    engine.deliver(1, [Reject(2, bad, "NON_FINITE", "tensor w")])

    engine.stop("the job is over")

    outcome = engine.find_outcome(bad, 0)
    assert outcome is not None
    assert (outcome.status, outcome.detail) == ("rejected", "tensor w")
    for key in (open_one, None):
        with pytest.raises(UnreachableError, match="stopping: the job is over"):
            engine.find_outcome(key, 0)


def test_shared_memory_of_workers_is_dropped_with_the_log_they_joined(engine: ShardEngine) -> None:
    """After a rollback they return as new workers and offer their memory again."""
    region = SharedRegion(2 * 4096)
    engine.traffic.shared_buffers.add(1, WorkerBuffers.attached(1, region.share(), 4096))

    engine.install(following(2))

    with pytest.raises(UnreachableError, match="not attached"):
        engine.traffic.shared_buffers.find(pb.PushPullHeader(worker=1, memory=1))


def test_a_rejection_and_the_eviction_with_it_become_visible_together(engine: ShardEngine) -> None:
    """Else the worker would sometimes learn only that its push was rejected."""
    bad, seen = stage(engine, 1), list[str]()

    def find_reason() -> None:
        outcome = engine.live.machine.outcome(bad)
        seen.append(outcome.reason if outcome is not None else "")

    with engine.live.changes.watch(bad, find_reason):
        engine.deliver(1, [Reject(2, bad, "NON_FINITE", "tensor w"), Evict(3, 1, "QUARANTINED")])

    assert set(seen) == {"FENCED"}


@pytest.mark.parametrize(("floats", "is_quick"), [(4, True), (64 << 10, True), (65 << 10, False)])
def test_requests_for_a_small_part_of_a_model_are_quick(floats: int, is_quick: bool) -> None:
    """Streams then answer them without another thread."""
    traffic = WorkerTraffic(ServerMetrics(CollectorRegistry(), shard=0), 1 << 20, "auto")
    engine = ShardEngine(following(1), traffic, no_snapshot, SilentCoordinator())
    assert not engine.is_quick  # there is no model
    engine.set_model(ModelSpec((TensorSpec("w", (floats,), "float32"),), SPEC.optimizer))

    assert engine.is_quick is is_quick
