"""A job whose fake servers train by plain SGD without a policy, with hooks for faults."""

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from pscommon.core.errors import MismatchError, UnreachableError
from pscommon.core.model_spec import ModelSpec
from pscommon.core.partition import PartitionPlan
from pscommon.wire.frames import (
    Filler,
)
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import parameter_server_pb2 as ps
from psworker.exchange.transfer import ShardTransfer

Hook = Callable[[], None]
Key = tuple[int, int]


def lost() -> None:
    """Break the connection; a hook."""
    raise UnreachableError("connection reset", "UNREACHABLE")


class FakeJob:
    """State of a job with fake servers. `changed` guards the state, which tests read and change.

    before, after: hooks by shard, called once at the start and before the answer of an Exchange.
    incoming, outgoing: hooks by shard, called with the number of each data frame before the
    server receives or sends it.
    control: hooks by method of the coordinator.
    waits_for: reason for which pushes stay undecided, if not empty.
    fenced: fenced workers; draining: workers asked to leave; open_loop: answer of Join.
    """

    def __init__(self, shards: int, lr: float, lease: float) -> None:
        self.shards, self.lr, self.lease = shards, lr, lease
        self.job, self.policy = "job-1", "sync"
        self.changed = threading.Condition()
        self.before: dict[int, deque[Hook]] = defaultdict(deque)
        self.after: dict[int, deque[Hook]] = defaultdict(deque)
        self.incoming: dict[int, Callable[[int], None]] = {}
        self.outgoing: dict[int, Callable[[int], None]] = {}
        self.control: dict[str, deque[Hook]] = defaultdict(deque)
        self.waits_for, self.stopping = "", False
        self.calls: Counter[str] = Counter()
        self.received: list[ps.PushPullHeader] = []
        self.joins: list[co.JoinRequest] = []
        self.beats: list[co.HeartbeatRequest] = []
        self.left: dict[int, str] = {}
        self.returned: list[tuple[int, int]] = []
        self.metrics: dict[str, float] = {}
        self.batches: deque[co.NextBatchResponse] = deque()
        self.asked: list[co.NextBatchRequest] = []
        self.fenced: set[int] = set()
        self.draining: set[int] = set()
        self.open_loop = 0
        self.plan: PartitionPlan | None = None
        self.digest: str | None = None
        self.flat_buffer = np.zeros(0, np.uint8)
        self.begun = False
        self.version = 0
        self.counted: list[Key] = []
        self._uploader = 0
        self._staged: dict[Key, dict[int, tuple[ps.PushPullHeader, bytes]]] = defaultdict(dict)
        self._decided: dict[Key, ps.ExchangeResult] = {}

    def wait_until(self, condition: Callable[[], Any], seconds: float = 20.0) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, seconds), "did not happen in time"

    def fence(self, worker: int) -> None:
        """Continue the job without this worker."""
        with self.changed:
            self.fenced.add(worker)

    def deal(self, *answers: int | None) -> None:
        """Set the answers of the next data requests: batch numbers, or None for the end of the
        loop.
        """
        with self.changed:
            for number in answers:
                numbers, end = ([], True) if number is None else ([number], False)
                self.batches.append(
                    co.NextBatchResponse(numbers=numbers, end=end, version=self.version)
                )

    def release(self) -> None:
        """Decide waiting pushes."""
        with self.changed:
            self.waits_for = ""
            self._decide()
            self.changed.notify_all()

    def tensor(self, name: str) -> np.ndarray[Any, Any]:
        """Return the servers' float32 value of a tensor."""
        assert self.plan is not None
        index = next(i for i, tensor in enumerate(self.plan.spec.tensors) if tensor.name == name)
        start, stop = self.plan.extent(index)
        return (
            self.flat_buffer[start:stop]
            .view(np.float32)
            .reshape(self.plan.spec.tensors[index].shape)
        )

    # ---- for the servers, which hold the lock ----------------------------------------------------

    def register(self, worker: int, model: ModelSpec) -> "co.RegisterResponse.State.ValueType":
        if self.plan is None:
            self.plan, self._uploader = PartitionPlan(model, self.shards), worker
            self.flat_buffer = np.zeros(self.plan.nbytes, np.uint8)
        if lines := model.differences(self.plan.spec):
            raise MismatchError(
                "this model is not the job's:\n" + "\n".join(lines), "MODEL_MISMATCH"
            )
        if self.begun:
            return co.RegisterResponse.STATE_READY
        return (
            co.RegisterResponse.STATE_UPLOAD
            if worker == self._uploader
            else co.RegisterResponse.STATE_PENDING
        )

    def stage(self, shard: int, header: ps.PushPullHeader, data: bytes) -> bool:
        """Return False if the push was decided before."""
        key = (header.worker, header.seq)
        if key in self._decided:
            return False
        self._staged[key].setdefault(shard, (header, data))
        self._decide()
        self.changed.notify_all()
        return True

    def outcome(self, key: Key) -> ps.ExchangeResult | None:
        return self._decided.get(key)

    def _decide(self) -> None:
        for key, parts in list(self._staged.items()):
            if len(parts) == self.shards and not (self.waits_for and key[1]):
                del self._staged[key]
                self._decided[key] = self._begin(parts) if key[1] == 0 else self._apply(key, parts)

    def _begin(self, parts: dict[int, tuple[ps.PushPullHeader, bytes]]) -> ps.ExchangeResult:
        self._spread(self.flat_buffer, parts)
        self.begun = True
        return ps.ExchangeResult(outcome=ps.OUTCOME_APPLIED, version=0)

    def _apply(
        self, key: Key, parts: dict[int, tuple[ps.PushPullHeader, bytes]]
    ) -> ps.ExchangeResult:
        assert self.plan is not None
        gradients, header = self.flat_buffer.copy(), parts[0][0]
        stop = self.plan.section("trainable").stop
        gradients[:stop] = 0
        self._spread(gradients, parts)
        slope = gradients[:stop].view(np.float32)
        if not np.isfinite(slope).all():
            detail = f"worker {key[0]}: tensor w"
            return ps.ExchangeResult(
                outcome=ps.OUTCOME_REJECTED, reason="NON_FINITE", detail=detail
            )
        staleness = self.version - header.base
        self.version += 1
        self.counted.append(key)
        self.flat_buffer[:stop].view(np.float32)[...] -= np.float32(self.lr) * slope
        self.flat_buffer[stop:] = gradients[stop:]
        return ps.ExchangeResult(
            outcome=ps.OUTCOME_APPLIED,
            version=self.version,
            staleness=staleness,
            apply_seconds=0.25,
            wait_seconds=0.5,
        )

    def _spread(
        self, flat_buffer: np.ndarray[Any, Any], parts: dict[int, tuple[ps.PushPullHeader, bytes]]
    ) -> None:
        assert self.plan is not None
        for shard, (header, data) in parts.items():
            move = ShardTransfer(
                self.plan,
                flat_buffer.data,
                None,
                frozenset(header.absent),
                everything=header.initial,
            )
            filler = Filler(move.sent(shard))
            filler.fill(memoryview(data))
            assert filler.complete
