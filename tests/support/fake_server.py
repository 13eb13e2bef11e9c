"""Fake servers of a job in memory, over real gRPC: plain SGD, no policy, and injected faults."""

import json
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import grpc
import numpy as np

from pscommon.core.errors import FencedError, InvalidRequestError, MismatchError, UnreachableError
from pscommon.core.model_spec import ModelSpec
from pscommon.core.partition import PartitionPlan
from pscommon.wire import messages as codec
from pscommon.wire.channel import SERVER_OPTIONS
from pscommon.wire.frames import (
    Filler,
    Frame,
    add_parameter_server_to_server,
    chunks,
    decode_request,
    encode_header,
)
from pscommon.wire.status import answering
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import parameter_server_pb2 as ps
from psproto.v1.coordinator_pb2_grpc import (
    CoordinatorServiceServicer,
    add_CoordinatorServiceServicer_to_server,
)
from psworker.exchange.transfer import ShardTransfer

Hook = Callable[[], None]
Key = tuple[int, int]


def _nothing(number: int) -> None:
    """No hook."""


def lost() -> None:
    """Break the connection; a hook."""
    raise UnreachableError("connection reset", "UNREACHABLE")


class FakeCluster:
    """All servers of one job. `changed` guards the state, which tests read and change.

    before, after: hooks by shard, called once at the start and before the answer of an Exchange.
    incoming, outgoing: by shard, called with the number of each data frame before it is taken or
    sent.
    waits_for: reason for which pushes stay undecided, if not empty.
    joined: followers know shard 0 from the start.
    fenced: fenced workers; draining: workers asked to leave; open_loop: answer of Join.
    """

    def __init__(
        self, shards: int = 1, lr: float = 0.5, lease: float = 5.0, joined: bool = True
    ) -> None:
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
        self.servers: list[FakeServer] = []
        for shard in range(shards):
            self.servers.append(FakeServer(self, shard, joined or shard == 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.stop()

    @property
    def addresses(self) -> list[str]:
        return [server.address for server in self.servers]

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

    # ---- what the servicers call, under the lock -------------------------------------------------

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


class FakeServer(CoordinatorServiceServicer):
    """One server; shard 0 also coordinates.

    job, shard, shards, advertised, coordinator: its answers to Describe.
    """

    def __init__(
        self, cluster: FakeCluster, shard: int, joined: bool, bind: str = "127.0.0.1:0"
    ) -> None:
        self.cluster, self.shard, self.shards = cluster, shard, cluster.shards
        self.grpc = grpc.server(ThreadPoolExecutor(32), options=SERVER_OPTIONS)
        add_parameter_server_to_server(self, self.grpc)
        add_CoordinatorServiceServicer_to_server(self, self.grpc)
        self.address = self.advertised = f"127.0.0.1:{self.grpc.add_insecure_port(bind)}"
        self.job = cluster.job if joined else ""
        leader = cluster.servers[0].address if shard else self.address
        self.coordinator = leader if joined else ""
        self.known: list[str] | None = None
        self.introduced: list[str] = []
        self.grpc.start()

    def stop(self) -> None:
        self.grpc.stop(None).wait(10)

    def addresses(self) -> list[str]:
        """Return the addresses that this server knows."""
        if self.known is not None:
            return self.known
        servers = self.cluster.servers
        linked = [server.advertised if server.job or server is self else "" for server in servers]
        own = [server.advertised if server is self else "" for server in servers]
        return linked if self.job else own

    def Describe(
        self, request: ps.DescribeRequest, context: grpc.ServicerContext
    ) -> ps.DescribeResponse:
        self.cluster.calls["Describe"] += 1
        return ps.DescribeResponse(
            job=self.job,
            shard=self.shard,
            shards=self.shards,
            addresses=self.addresses(),
            coordinator=self.coordinator,
        )

    def Introduce(
        self, request: ps.IntroduceRequest, context: grpc.ServicerContext
    ) -> ps.IntroduceResponse:
        self.introduced.append(request.coordinator)
        self.coordinator, self.job = request.coordinator, self.cluster.job
        return ps.IntroduceResponse()

    def Exchange(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        self.cluster.calls["Exchange"] += 1
        with answering(context):
            result, views = self._answer(frames)
            yield encode_header(result)
            for number, frame in enumerate(chunks(views)):
                self.cluster.outgoing.get(self.shard, _nothing)(number)
                yield frame

    def ExchangeOnce(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.cluster.calls["ExchangeOnce"] += 1
        with answering(context):
            result, views = self._answer(iter([request]))
            return encode_header(result, *views)

    def AttachMemory(
        self, request: ps.AttachMemoryRequest, context: grpc.ServicerContext
    ) -> ps.AttachMemoryResponse:
        return ps.AttachMemoryResponse(reason="a fake has no memory")

    def _answer(self, requests: Iterator[bytes]) -> tuple[ps.ExchangeResult, list[memoryview]]:
        header, first, _ = decode_request(next(requests))
        assert header is not None
        if hooks := self.cluster.before[self.shard]:
            hooks.popleft()()
        frames = self._counted(requests)
        data = (
            self._opened(header, frames)
            if header.open
            else b"".join([first, *(frame.data for frame in frames)])
        )
        answer = self._exchanged(header, data)
        if hooks := self.cluster.after[self.shard]:
            hooks.popleft()()
        return answer

    def _counted(self, requests: Iterator[bytes]) -> Iterator[Frame[ps.PushPullHeader]]:
        for number, raw in enumerate(requests):
            self.cluster.incoming.get(self.shard, _nothing)(number)
            yield decode_request(raw)

    def _opened(
        self, header: ps.PushPullHeader, frames: Iterator[Frame[ps.PushPullHeader]]
    ) -> bytes:
        """Return a push that arrives in pieces as one; missing parts are NaN."""
        plan = self.cluster.plan
        assert plan is not None
        ranges = plan.range(self.shard, "trainable"), plan.range(self.shard, "buffer")
        flat_buffer = bytearray(b"\xff" * plan.nbytes)
        for frame in frames:
            start = (
                ranges[0].start
                if frame.offset < ranges[0].nbytes
                else ranges[1].start - ranges[0].nbytes
            )
            flat_buffer[start + frame.offset : start + frame.offset + frame.data.nbytes] = (
                frame.data
            )
            if frame.header is not None:
                header.MergeFrom(frame.header)
                move = ShardTransfer(plan, memoryview(flat_buffer), None, frozenset(header.absent))
                return b"".join(move.sent(self.shard))
        raise InvalidRequestError("the push ended without the header that closes it")

    def _exchanged(
        self, header: ps.PushPullHeader, data: bytes
    ) -> tuple[ps.ExchangeResult, list[memoryview]]:
        cluster, key = self.cluster, (header.worker, header.seq)
        pushes = header.initial or header.seq > 0
        with cluster.changed:
            cluster.received.append(header)
            self._check(header.job, header.worker)
            fresh = not (pushes and header.has_data) or cluster.stage(self.shard, header, data)
            cluster.changed.wait_for(
                lambda: self._ready(header, pushes), min(header.wait_ms / 1000, 0.05)
            )
            if not self._ready(header, pushes):
                return ps.ExchangeResult(
                    outcome=ps.OUTCOME_PENDING, waiting_for=cluster.waits_for
                ), []
            result = ps.ExchangeResult(outcome=ps.OUTCOME_NONE)
            result.CopyFrom(cluster.outcome(key) if pushes else result)
            if not fresh:
                result.outcome = ps.OUTCOME_DUPLICATE
            return self._with_weights(header, result)

    def _ready(self, header: ps.PushPullHeader, pushes: bool) -> bool:
        decided = not pushes or self.cluster.outcome((header.worker, header.seq)) is not None
        return (
            decided
            and self.cluster.version >= header.min_version
            and (pushes or self.cluster.begun)
        )

    def _with_weights(
        self, header: ps.PushPullHeader, result: ps.ExchangeResult
    ) -> tuple[ps.ExchangeResult, list[memoryview]]:
        result.version = max(result.version, self.cluster.version)
        if header.pull not in (ps.PULL_STEP, ps.PULL_ALL):
            return result, []
        assert self.cluster.plan is not None
        copy = self.cluster.flat_buffer.copy().data
        views = ShardTransfer(
            self.cluster.plan, None, copy, everything=header.pull == ps.PULL_ALL
        ).received(self.shard)
        result.nbytes, result.pulled = sum(view.nbytes for view in views), True
        return result, views

    def _check(self, job: str, worker: int) -> None:
        if job and job != self.cluster.job:
            raise MismatchError(f"this is job {self.cluster.job}, not {job}", "JOB_MISMATCH")
        if worker in self.cluster.fenced:
            raise FencedError(f"worker {worker} is no longer a member of the job: its lease ended")

    # ---- the coordinator -------------------------------------------------------------------------

    def _enter(self, method: str, request: Any) -> None:
        self.cluster.calls[method] += 1
        self.cluster.changed.notify_all()
        if hooks := self.cluster.control[method]:
            hooks.popleft()()
        self._check(request.job, getattr(request, "worker", 0))
        self.cluster.metrics |= {sent.name: sent.value for sent in getattr(request, "values", ())}

    def Join(self, request: co.JoinRequest, context: grpc.ServicerContext) -> co.JoinResponse:
        with answering(context), self.cluster.changed:
            self._enter("Join", request)
            self.cluster.joins.append(request)
            return co.JoinResponse(
                job=self.cluster.job,
                worker=len(self.cluster.joins),
                addresses=self.cluster.addresses,
                lease_ms=round(self.cluster.lease * 1000),
                policy=self.cluster.policy,
                open_loop=self.cluster.open_loop,
                known_loops=self.cluster.open_loop,
            )

    def Register(
        self, request: co.RegisterRequest, context: grpc.ServicerContext
    ) -> co.RegisterResponse:
        cluster = self.cluster
        with answering(context), cluster.changed:
            self._enter("Register", request)
            state = (
                co.RegisterResponse.STATE_READY
                if cluster.begun
                else co.RegisterResponse.STATE_PENDING
            )
            if not request.observe:
                state = cluster.register(request.worker, codec.model_from_proto(request.model))
            if state == co.RegisterResponse.STATE_PENDING:
                cluster.changed.wait_for(lambda: cluster.begun, 0.02)
                return co.RegisterResponse(
                    state=state, waiting_for="the initial weights from worker 1"
                )
            assert cluster.plan is not None
            return co.RegisterResponse(
                state=state,
                model=codec.model_to_proto(cluster.plan.spec),
                plan_digest=cluster.plan.digest if cluster.digest is None else cluster.digest,
                version=cluster.version,
                groups_json='[{"lr": 0.5}]',
            )

    def Heartbeat(
        self, request: co.HeartbeatRequest, context: grpc.ServicerContext
    ) -> co.HeartbeatResponse:
        with answering(context), self.cluster.changed:
            self.cluster.beats.append(request)
            self._enter("Heartbeat", request)
            return co.HeartbeatResponse(
                version=self.cluster.version,
                stopping=self.cluster.stopping,
                draining=request.worker in self.cluster.draining,
            )

    def Leave(self, request: co.LeaveRequest, context: grpc.ServicerContext) -> co.LeaveResponse:
        with answering(context), self.cluster.changed:
            self._enter("Leave", request)
            self.cluster.left[request.worker] = request.reason
            self.cluster.fenced.add(request.worker)
            self.cluster.changed.notify_all()
            return co.LeaveResponse()

    def NextBatch(
        self, request: co.NextBatchRequest, context: grpc.ServicerContext
    ) -> co.NextBatchResponse:
        with answering(context), self.cluster.changed:
            self.cluster.asked.append(request)
            self._enter("NextBatch", request)
            return self.cluster.batches.popleft()

    def ReturnBatches(
        self, request: co.ReturnBatchesRequest, context: Any
    ) -> co.ReturnBatchesResponse:
        with answering(context), self.cluster.changed:
            self._enter("ReturnBatches", request)
            self.cluster.returned += [(batch.loop, batch.number) for batch in request.batches]
            return co.ReturnBatchesResponse()

    def ReportMetrics(
        self, request: co.ReportMetricsRequest, context: grpc.ServicerContext
    ) -> co.ReportMetricsResponse:
        with answering(context), self.cluster.changed:
            self._enter("ReportMetrics", request)
            self.cluster.metrics |= dict(request.metrics)
            return co.ReportMetricsResponse()

    def GetStatus(
        self, request: co.GetStatusRequest, context: grpc.ServicerContext
    ) -> co.GetStatusResponse:
        return co.GetStatusResponse(
            status_json=json.dumps({"job": self.cluster.job, "state": "running"})
        )
