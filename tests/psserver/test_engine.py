"""One shard's engine: what those who wait are told when it stops."""

import pytest
from prometheus_client import CollectorRegistry

from pscommon.core.errors import UnreachableError
from pscommon.core.log import Begin, PushKey, Reject, Staged
from pscommon.core.model import ModelSpec, OptimizerSpec, TensorSpec
from psserver.engine import Engine
from psserver.metrics import ServerMetrics

SPEC = ModelSpec((TensorSpec("w", (4,), "float32"),), OptimizerSpec("sgd", ({"lr": 1.0},)))


@pytest.fixture
def engine() -> Engine:
    """With weights."""
    engine = Engine(0, 1, ServerMetrics(CollectorRegistry(), shard=0), lambda cut, store: None, 1 << 20, "grpc")
    engine.begin_log(1, 0, 1)
    engine.set_model(SPEC)
    stage(engine, 0)
    engine.deliver(1, [Begin(1, 1)])
    return engine


def stage(engine: Engine, seq: int) -> PushKey:
    key = PushKey(1, seq)
    engine.stage(Staged(key, 1, 0), engine.wait_for_store(0.0).staging(initial=seq == 0))
    return key


def test_the_push_that_ends_the_job_is_answered(engine: Engine) -> None:
    """A server may stop faster than its answer goes out: whoever has ended the job is to hear why."""
    bad, open_one = stage(engine, 1), stage(engine, 2)
    engine.deliver(1, [Reject(2, bad, "NON_FINITE", "tensor w")])

    engine.stop("the job is over")

    outcome = engine.wait(bad, 0, 0.0, lambda: True)
    assert outcome is not None
    assert (outcome.status, outcome.detail) == ("rejected", "tensor w")
    for key in (open_one, None):
        with pytest.raises(UnreachableError, match="stopping: the job is over"):
            engine.wait(key, 0, 0.0, lambda: True)
