"""Fake servers of a job in memory, over real gRPC, with injected faults."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import grpc

from pscommon.core.errors import FencedError, InvalidRequestError, MismatchError
from pscommon.wire import messages as codec
from pscommon.wire.endpoint import SERVER_OPTIONS
from pscommon.wire.frames import (
    Frame,
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
from tests.support.fake_job import FakeJob
from tests.support.parameter_server_service import add_parameter_server_to_server


def _nothing(number: int) -> None:
    """No hook."""


class FakeCluster(FakeJob):
    """All servers of one job. joined: all servers know shard 0 from the start."""

    def __init__(
        self, shards: int = 1, lr: float = 0.5, lease: float = 5.0, joined: bool = True
    ) -> None:
        super().__init__(shards, lr, lease)
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
            format=3,
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
                loaders=[co.LoaderPasses(loader="0", begun=self.cluster.open_loop)],
                format=3,
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
