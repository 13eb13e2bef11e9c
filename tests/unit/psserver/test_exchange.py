"""Exchanges without a network: which calls each case makes, and what a failure at each leaves."""

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import coroutine
from typing import Any, TypeVar

import pytest
import torch
from prometheus_client import CollectorRegistry

from pscommon.core.errors import PSError
from pscommon.core.log_entries import Apply, Begin, Contribution, Evict, PushKey, Reject, Staged
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from pscommon.system.shared_memory import SharedRegion
from pscommon.system.thread_team import ALONE
from pscommon.wire.stream_format import EAGER_BYTES
from psproto.v1 import parameter_server_pb2 as pb
from psserver.durability.shard_state import ShardState
from psserver.exchange.exchange import Exchange, Moved, Weights
from psserver.exchange.push_receiver import OpenPushReceiver
from psserver.parameters.staging import StagingPool
from psserver.parameters.weight_reads import WeightRead
from psserver.process.identity import ServerIdentity
from psserver.process.metrics import ServerMetrics
from psserver.shard.engine import ShardEngine
from psserver.shard.worker_traffic import WorkerBuffers, WorkerTraffic
from psserver.waiting import ThreadWaiter, run
from tests.support.coordinators import SilentCoordinator, no_snapshot

T = TypeVar("T")

SMALL, LARGE = 16, EAGER_BYTES // 4 + 16
"""Elements of the model. Weights of the large one are sent from where they are."""
BUDGET = 4 * LARGE + 4
"""Bytes in flight: enough for one push."""


@coroutine
def reach(call: str) -> Generator[str, None, None]:
    """Suspend at a call of the io."""
    yield call


class ScriptedIO:
    """Moves no bytes, and suspends at each call. Its `wake` is counted."""

    is_over = False
    may_act_here = False

    def __init__(self, closing: pb.PushPullHeader | None = None) -> None:
        self.wakes = 0
        self.received_pieces = 0
        self._closing = closing

    def wake(self) -> None:
        self.wakes += 1

    async def park(self, seconds: float) -> None:
        await reach("wait")

    async def do(
        self, action: Callable[[], T], abandoned: Callable[[T], object] | None = None
    ) -> T:
        try:
            await reach("do")
        except BaseException:
            with suppress(PSError):
                result = action()  # it runs to its end in its own thread
                if abandoned is not None:
                    abandoned(result)
            raise
        return action()

    async def receive(self, views: Sequence[memoryview], filled: Callable[[int], None]) -> None:
        nbytes = sum(view.nbytes for view in views)
        await reach(f"receive {nbytes} bytes")
        for view in views:
            view[:] = bytes(view.nbytes)
        filled(nbytes)

    async def receive_piece(self, receiver: OpenPushReceiver) -> pb.PushPullHeader | None:
        self.received_pieces += 1
        await reach(f"receive piece {self.received_pieces}")
        if self.received_pieces > 2:
            return self._closing
        half = 4 * SMALL // 2
        for view in receiver.views_at((self.received_pieces - 1) * half, half):
            view[:] = bytes(view.nbytes)
        receiver.received((self.received_pieces - 1) * half, half)
        return None

    async def discard(self) -> None:
        await reach("discard")

    async def send(self, result: pb.ExchangeResult, weights: Weights, moved: Moved) -> None:
        outcome = pb.Outcome.Name(result.outcome).removeprefix("OUTCOME_").lower()
        sent = f"send {outcome} version {result.version}"
        if isinstance(weights, WeightRead):
            sent += f", read {weights.nbytes} bytes"
        elif weights is not None:
            sent += f", {len(weights)} bytes"
        await reach(sent)


@dataclass
class Case:
    """An exchange with a shard at version 0, and what happens while it waits.

    Attributes:
        header: The request.
        elements: Size of the model.
        before: Prepares the shard.
        during: Carried out at the first wait.
        closing: Header that closes an open push.
    """

    header: pb.PushPullHeader
    elements: int = SMALL
    before: Callable[[ShardEngine], object] = lambda engine: None
    during: Callable[[ShardEngine], object] = lambda engine: None
    closing: pb.PushPullHeader | None = None
    engine: ShardEngine = field(init=False)
    buffers: list[int] = field(init=False, default_factory=list)

    def prepare(self) -> None:
        self.engine = make_engine(self.elements)
        self.before(self.engine)

    def run(self, fail_at: int | None = None, how: str = "close") -> list[str]:
        """Carry out the exchange, and return its calls. fail_at: The call that ends it."""
        io, calls = ScriptedIO(self.closing), list[str]()
        header = pb.PushPullHeader()
        header.CopyFrom(self.header)
        exchange = Exchange(self.engine, ServerIdentity(0, 1, "here", job="one"), header).run(io)
        has_waited = False
        while True:
            try:
                calls.append(exchange.send(None))
            except StopIteration:
                return calls
            except PSError as error:
                return [*calls, f"{type(error).__name__} {error.reason}"]
            if fail_at is not None and len(calls) > fail_at:
                if how == "close":
                    exchange.close()
                    return calls
                with pytest.raises(ConnectionError):
                    exchange.throw(ConnectionError())
                return calls
            if calls[-1] == "wait" and not has_waited:
                has_waited = True
                self.during(self.engine)

    def check_released(self) -> None:
        """Check that nothing is left once the staged pushes are decided."""
        engine = self.engine
        machine, index = engine.live.machine, engine.live.machine.index
        for number, key in enumerate([*machine.staged], start=index + 1):
            engine.deliver(1, [Reject(number, key, "STALE", "the end of the test")])
        store, budget = engine.live.require_store(), engine.traffic.budget
        assert (budget.used, budget.waiting) == (0, 0)
        assert not store._reads._open_reads
        assert not store._reads._read_counts
        assert not engine.live.changes.keys


def make_engine(elements: int) -> ShardEngine:
    metrics = ServerMetrics(CollectorRegistry(), shard=0)
    state = ShardState(0, 1, ALONE)
    state.machine.follow(1, 0)
    traffic = WorkerTraffic(metrics, BUDGET, "auto")
    engine = ShardEngine(state, traffic, no_snapshot, SilentCoordinator())
    spec = TensorSpec("w", (elements,), "float32")
    engine.set_model(ModelSpec((spec,), OptimizerSettings("sgd", ({"lr": 1.0},))))
    stage(engine, PushKey(1, 0))
    engine.deliver(1, [Begin(1, 1)])
    return engine


def stage(engine: ShardEngine, key: PushKey) -> None:
    staging = engine.live.require_store().allocate_staging(initial=key.seq == 0)
    for view in staging.views:
        view[:] = bytes(view.nbytes)
    engine.stage_push(Staged(key, 1, 0), staging)


def count(engine: ShardEngine) -> None:
    """Let the push count."""
    index = engine.live.machine.index + 1
    engine.deliver(1, [Apply(index, 1, (Contribution(PushKey(1, 1), 1, 0),))])


def reject(engine: ShardEngine) -> None:
    engine.deliver(1, [Reject(2, PushKey(1, 1), "STALE", "too old")])


def count_before(engine: ShardEngine) -> None:
    stage(engine, PushKey(1, 1))
    count(engine)


def fill_budget(engine: ShardEngine) -> None:
    engine.full = run(engine.traffic.budget.take(9, BUDGET, 0.0, ThreadWaiter(), is_push=True))  # type: ignore[attr-defined]


def free_budget(engine: ShardEngine) -> None:
    engine.traffic.budget.release(engine.full)  # type: ignore[attr-defined]


def freed_at_once(engine: ShardEngine) -> None:
    fill_budget(engine)
    free_budget(engine)


def push(pull: Any = pb.PULL_STEP, **fields: Any) -> pb.PushPullHeader:
    values = {
        "job": "one",
        "worker": 1,
        "seq": 1,
        "has_data": True,
        "samples": 1,
        "wait_ms": 9000,
    } | fields
    return pb.PushPullHeader(pull=pull, **values)


def part(*ranges: int, target: Any = pb.TARGET_MODEL, encoding: Any = pb.ENCODING_RAW) -> pb.Part:
    return pb.Part(target=target, encoding=encoding, ranges=ranges)


REFUSED = "InvalidRequestError INVALID_REQUEST"

CASES = {
    "a push": (
        Case(push(), during=count),
        ["receive 64 bytes", "do", "wait", "do", "do", "send applied version 1, 64 bytes"],
    ),
    "a push without a pull": (
        Case(push(pb.PULL_NONE), during=count),
        ["receive 64 bytes", "do", "wait", "do", "send applied version 1"],
    ),
    "a large push": (
        Case(push(), LARGE, during=count),
        [
            *(f"receive {4 * LARGE} bytes", "do", "wait", "do", "do"),
            f"send applied version 1, read {4 * LARGE} bytes",
        ],
    ),
    "an open push": (
        Case(push(open=True), during=count, closing=pb.PushPullHeader(samples=3)),
        [
            *(f"receive piece {number}" for number in (1, 2, 3)),
            *("do", "wait", "do", "do", "send applied version 1, 64 bytes"),
        ],
    ),
    "a push that was decided before": (
        Case(push(), before=count_before),
        ["discard", "do", "do", "send duplicate version 1, 64 bytes"],
    ),
    "a push that was received before": (
        Case(push(), before=lambda engine: stage(engine, PushKey(1, 1)), during=count),
        ["discard", "wait", "do", "do", "send applied version 1, 64 bytes"],
    ),
    "the outcome of a push": (
        Case(
            push(has_data=False),
            before=lambda engine: stage(engine, PushKey(1, 1)),
            during=count,
        ),
        ["wait", "do", "do", "send applied version 1, 64 bytes"],
    ),
    "a stale push": (
        Case(push(pb.PULL_NONE), during=reject),
        ["receive 64 bytes", "do", "wait", "do", "send stale version 0"],
    ),
    "a push of a former member": (
        Case(push(), before=lambda engine: engine.deliver(1, [Evict(2, 1, "it left")])),
        ["discard", "do", "FencedError FENCED"],
    ),
    "a push that is not decided in time": (
        Case(push(wait_ms=0)),
        ["receive 64 bytes", "do", "do", "send pending version 0"],
    ),
    "a push that waits for memory": (
        Case(push(pb.PULL_NONE), before=fill_budget, during=free_budget),
        ["wait", "receive 64 bytes", "do", "wait"],
    ),
    "a push without memory": (
        Case(push(wait_ms=0), before=fill_budget),
        ["InFlightError IN_FLIGHT"],
    ),
    "a push of no samples": (
        Case(push(samples=0)),
        ["receive 64 bytes", REFUSED],
    ),
    "a push of two parts": (
        Case(push(parts=[part(32, 64), part(0, 32)]), during=count),
        ["receive 64 bytes", "do", "wait", "do", "do", "send applied version 1, 64 bytes"],
    ),
    **{
        name: (Case(header), [REFUSED])
        for name, header in {
            "an unknown encoding": push(parts=[part(0, 64, encoding=7)]),
            "an unknown target": push(parts=[part(0, 64, target=7)]),
            "a range without an end": push(parts=[part(0, 32, 32)]),
            "an open push that names parts": push(open=True, parts=[part(0, 64)]),
        }.items()
    },
    "an open push that names parts at its end": (
        Case(push(open=True), closing=pb.PushPullHeader(parts=[part(0, 64)])),
        [*(f"receive piece {number}" for number in (1, 2, 3)), REFUSED],
    ),
    "a pull": (
        Case(push(seq=0, has_data=False)),
        ["do", "do", "send none version 0, 64 bytes"],
    ),
    "a pull of all weights": (
        Case(push(pb.PULL_ALL, seq=0, has_data=False)),
        ["do", "do", "send none version 0, read 64 bytes"],
    ),
    "a pull of a version that the shard does not have yet": (
        Case(
            push(seq=0, has_data=False, min_version=1),
            before=lambda engine: stage(engine, PushKey(1, 1)),
            during=count,
        ),
        ["wait", "do", "do", "send none version 1, 64 bytes"],
    ),
    "another shard count": (Case(push(shards=2)), ["LayoutError LAYOUT"]),
}


@pytest.mark.parametrize("name", CASES)
def test_each_case_makes_these_calls(name: str) -> None:
    case, expected = CASES[name]
    case.prepare()
    if name == "a push that waits for memory":
        # it stays undecided: the second wait ends with the connection
        assert case.run(fail_at=3) == expected
    else:
        assert case.run() == expected


@pytest.mark.parametrize("how", ["close", "throw"])
@pytest.mark.parametrize("name", CASES)
def test_a_failure_at_any_call_releases_everything(
    name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, calls = CASES[name]
    taken = list[int]()
    take, give_back = StagingPool.take_buffers, StagingPool.return_buffers

    def counted_take(pool: StagingPool) -> Any:
        taken.append(1)
        return take(pool)

    def counted_return(pool: StagingPool, memory: Any) -> None:
        taken.pop()
        give_back(pool, memory)

    monkeypatch.setattr(StagingPool, "take_buffers", counted_take)
    monkeypatch.setattr(StagingPool, "return_buffers", counted_return)
    for number, call in enumerate(calls):
        if "Error" in call:
            continue
        case.prepare()
        assert case.run(fail_at=number, how=how) == calls[: number + 1]
        if case.before is fill_budget and case.engine.traffic.budget.used >= BUDGET:
            free_budget(case.engine)
        case.check_released()
        assert not taken


def test_shared_memory_moves_no_bytes() -> None:
    engine, region = make_engine(SMALL), SharedRegion(8 * SMALL)
    buffers = WorkerBuffers.attached(1, region.share(), 4 * SMALL)
    engine.traffic.shared_buffers.add(1, buffers)
    case = Case(push(memory=1), during=count)
    case.engine = engine

    assert case.run() == ["do", "wait", "do", "send applied version 1"]
    weights = torch.frombuffer(region.memory, dtype=torch.float32)[SMALL:]
    assert torch.equal(weights, torch.zeros(SMALL))


def test_an_exchange_for_another_job_is_refused() -> None:
    identity = ServerIdentity(0, 1, "here", job="one")
    exchange = Exchange(make_engine(SMALL), identity, push(job="another"))

    with pytest.raises(PSError, match="another"):
        exchange.run(ScriptedIO()).send(None)
