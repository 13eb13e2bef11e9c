"""The control plane's gRPC servicer: translates requests to calls of CoordinatorService and back.

It decides nothing (proto/psproto/v1/coordinator.proto).
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import grpc

from pscommon.core.data_loop import LoopSpec
from pscommon.core.formats import check_wire_format, spoken_format
from pscommon.core.limits import MAX_NAME_CHARACTERS, MAX_REASON_CHARACTERS
from pscommon.optim.specs import check_numbers, validate_model
from pscommon.telemetry import strict_json
from pscommon.wire.messages import (
    batches_from_proto,
    history_row_to_proto,
    loop_from_proto,
    model_from_proto,
    model_to_proto,
    place_from_proto,
)
from pscommon.wire.status import answering
from psproto.v1 import coordinator_pb2 as pb
from psproto.v1.coordinator_pb2_grpc import CoordinatorServiceServicer
from psserver.coordinator.heartbeats import received_value
from psserver.coordinator.service import CoordinatorService
from psserver.coordinator.shard_stream import serve_shard
from psserver.core.commands.data_commands import CallCollective, LeaseBatches, ReturnBatches
from psserver.core.commands.request_checks import wait_seconds
from psserver.core.commands.worker_commands import Join, Register
from psserver.core.workers.collectives import NULL, CollectiveValues
from psserver.core.workers.members import WorkerHeartbeat
from psserver.core.workers.reported_values import ReportedValue
from psserver.durability.snapshots import groups_of
from psserver.process.grpc_server import when_ended
from psserver.waiting import ThreadWaiter, Waiter, run

STATES = {"ready": pb.RegisterResponse.STATE_READY, "upload": pb.RegisterResponse.STATE_UPLOAD}

# None: called within this process; errors are raised unchanged
Context = grpc.ServicerContext | None


class ControlPlaneServicer(CoordinatorServiceServicer):
    """The control plane, on shard 0."""

    def __init__(self, service: CoordinatorService) -> None:
        self._service = service

    def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinResponse:
        with answering(context):
            check_wire_format(request.format, "the worker", "the server")
            rank = request.rank if request.HasField("rank") else None
            self._service.check_job(request.job)
            requests, training = self._service.worker_requests, request.training
            command = Join(
                rank, request.host, request.pid, request.device, request.attempt, training
            )
            member = run(
                requests.join(command, wait_seconds(request.wait_ms), ThreadWaiter(context))
            )
            if member is None:
                waiting = requests.waiting_to_join(training)
                return pb.JoinResponse(waiting_for=waiting, format=spoken_format())
            self._service.worker_exits.learn(member.worker, request.process[:MAX_NAME_CHARACTERS])
            return pb.JoinResponse(
                job=self._service.job,
                worker=member.worker,
                addresses=self._service.registry.addresses,
                lease_ms=round(self._service.config.lease * 1000),
                policy=self._service.policy,
                open_loop=self._service.ledger.open_loop,
                known_loops=self._service.ledger.known_loops,
                open_loops=self._service.ledger.open_loops,
                loaders=[
                    pb.LoaderPasses(loader=loader, begun=begun, open=still_open)
                    for loader, (begun, still_open) in self._service.passes_begun().items()
                ],
                bad_gradients=self._service.config.bad_gradients,
                standbys=self._service.registry.standbys,
                format=spoken_format(),
                training=self._service.training,
                **self._standing(member.worker),
            )

    def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterResponse:
        with answering(context):
            self._service.check_job(request.job)
            if request.observe:
                return self._observed()
            spec = validate_model(model_from_proto(request.model))
            for settings, tensors in spec.parts().values():
                check_numbers(settings, tensors)
            state = run(
                self._service.worker_requests.register(
                    Register(request.worker, spec, request.seed),
                    wait_seconds(request.wait_ms),
                    ThreadWaiter(context),
                )
            )
            if state not in STATES:
                waiting = self._service.waiting_for
                return pb.RegisterResponse(
                    state=pb.RegisterResponse.STATE_PENDING, waiting_for=waiting
                )
            return self._registered(STATES[state], request.worker)

    def _standing(self, worker: int) -> dict[str, Any]:
        workers, is_first = self._service.heartbeats.standing(worker)
        return {"workers": workers, "first": is_first}

    def _observed(self) -> pb.RegisterResponse:
        """Answer an observer: the model, once there are weights."""
        if not self._service.begun:
            waiting = self._service.waiting_for
            return pb.RegisterResponse(state=pb.RegisterResponse.STATE_PENDING, waiting_for=waiting)
        return self._registered(pb.RegisterResponse.STATE_READY)

    def _registered(
        self, state: pb.RegisterResponse.State.ValueType, worker: int = 0
    ) -> pb.RegisterResponse:
        plan = self._service.plan
        return pb.RegisterResponse(
            state=state,
            model=model_to_proto(plan.spec),
            plan_digest=plan.digest,
            version=self._service.version,
            groups_json=groups_of(self._service.engine.live.store),
            updates=self._service.update_counts,
            seed=self._service.seed,
            **self._standing(worker),
        )

    def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatResponse:
        with answering(context):
            self._service.check_job(request.job)
            beats = self._service.heartbeats
            beat = beats.beat(
                request.worker,
                WorkerHeartbeat(
                    request.step_seconds,
                    request.samples_per_second,
                    request.phase[:MAX_NAME_CHARACTERS],
                    request.no_call_seconds,
                ),
            )
            beats.report_beside(request.worker, _received_values(request.values))
            self._service.worker_exits.learn(request.worker, request.process[:MAX_NAME_CHARACTERS])
            registry = self._service.registry
            return pb.HeartbeatResponse(
                version=self._service.version,
                stopping=beat.is_over,
                draining=beat.is_draining,
                addresses=registry.served,
                terms=registry.terms,
                standbys=registry.standbys,
                policy=self._service.policy,
                workers=beat.workers,
                first=beat.is_first,
            )

    def ReportExit(self, request: pb.ReportExitRequest, context: Context) -> pb.ReportExitResponse:
        with answering(context):
            process, reason = (
                request.process[:MAX_NAME_CHARACTERS],
                request.reason[:MAX_REASON_CHARACTERS],
            )
            return pb.ReportExitResponse(workers=self._service.worker_exits.report(process, reason))

    def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveResponse:
        with answering(context):
            self._service.check_job(request.job)
            self._service.heartbeats.report_beside(request.worker, _received_values(request.values))
            self._service.worker_requests.leave(request.worker, request.reason, request.version)
            return pb.LeaveResponse()

    def NextBatch(self, request: pb.NextBatchRequest, context: Context) -> pb.NextBatchResponse:
        with answering(context):
            return run(self.next_batch(request, ThreadWaiter(context)))

    async def next_batch(
        self, request: pb.NextBatchRequest, waiter: Waiter
    ) -> pb.NextBatchResponse:
        """Answer a request within its time."""
        self._service.check_job(request.job)
        spec = loop_from_proto(request.loop)
        if request.share_only:
            return pb.NextBatchResponse(
                share=self._service.worker_requests.share(request.worker, spec)
            )
        place = place_from_proto(request.place) if request.HasField("place") else None
        command = LeaseBatches(
            request.worker,
            spec,
            request.received,
            max(1, request.count),
            request.idle,
            request.first_open if place is None else None,
            place,
        )
        batches = await self._service.worker_requests.lease_batches(
            command, wait_seconds(request.wait_ms), waiter
        )
        if batches is None:
            return pb.NextBatchResponse(
                waiting_for=self._service.waiting_for, version=self._service.version
            )
        share = 0 if request.received else self._service.worker_requests.share(request.worker, spec)
        answer = pb.NextBatchResponse(
            numbers=batches.numbers,
            end=batches.end,
            version=self._service.version,
            following=batches.following,
            share=share,
        )
        if place is not None and batches.spec is not None:
            answer.loop = batches.spec.loop
            if isinstance(batches.spec, LoopSpec):
                answer.first_epoch = batches.spec.first_epoch
        return answer

    def ReturnBatches(
        self, request: pb.ReturnBatchesRequest, context: Context
    ) -> pb.ReturnBatchesResponse:
        with answering(context):
            self._service.check_job(request.job)
            batches = batches_from_proto(request.batches)
            self._service.worker_requests.return_batches(
                ReturnBatches(request.worker, list(batches), request.used)
            )
            return pb.ReturnBatchesResponse()

    def Collective(self, request: pb.CollectiveRequest, context: Context) -> pb.CollectiveResponse:
        with answering(context):
            return run(self.collective(request, ThreadWaiter(context)))

    async def collective(
        self, request: pb.CollectiveRequest, waiter: Waiter
    ) -> pb.CollectiveResponse:
        """Answer a request within its time."""
        self._service.check_job(request.job)
        given = CollectiveValues(
            request.kind,
            tuple(request.names),
            tuple(request.values),
            request.samples,
            request.json or NULL,
        )
        requests = self._service.worker_requests
        place = place_from_proto(request.place) if request.HasField("place") else None
        command = CallCollective(request.worker, request.number, given, request.first_open, place)
        result = await requests.call_collective(command, wait_seconds(request.wait_ms), waiter)
        if result is None:
            waiting = requests.waiting_for_call(command.key)
            return pb.CollectiveResponse(waiting_for=waiting or self._service.waiting_for)
        return pb.CollectiveResponse(
            done=True,
            values=result.values,
            json=result.text,
            version=self._service.version,
        )

    def ReportMetrics(
        self, request: pb.ReportMetricsRequest, context: Context
    ) -> pb.ReportMetricsResponse:
        with answering(context):
            self._service.check_job(request.job)
            plain = [
                received_value(name, value, self._service.version, 0.0)
                for name, value in request.metrics.items()
            ]
            self._service.heartbeats.report(
                request.worker, [*plain, *_received_values(request.values)]
            )
            return pb.ReportMetricsResponse()

    def GetHistory(self, request: pb.GetHistoryRequest, context: Context) -> pb.GetHistoryResponse:
        with answering(context):
            rows = self._service.heartbeats.history()
            return pb.GetHistoryResponse(rows=map(history_row_to_proto, rows))

    def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        with answering(context):
            return pb.GetStatusResponse(status_json=strict_json.dumps(self._service.status()))

    def SaveSnapshot(
        self, request: pb.SaveSnapshotRequest, context: Context
    ) -> pb.SaveSnapshotResponse:
        with answering(context):
            version = self._service.snapshot_scheduler.save(wait_seconds(request.wait_ms))
            return pb.SaveSnapshotResponse(
                version=version, path=self._service.snapshots.path(version)
            )

    def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        with answering(context):
            self._service.drain(request.worker)
            return pb.DrainResponse()

    def RestoreSnapshot(
        self, request: pb.RestoreSnapshotRequest, context: Context
    ) -> pb.RestoreSnapshotResponse:
        with answering(context):
            self._service.restore(request.version, wait_seconds(request.wait_ms))
            return pb.RestoreSnapshotResponse()

    def SetPolicy(self, request: pb.SetPolicyRequest, context: Context) -> pb.SetPolicyResponse:
        with answering(context):
            staleness = request.staleness if request.HasField("staleness") else None
            max_staleness = request.max_staleness if request.HasField("max_staleness") else None
            self._service.set_policy(request.policy, staleness, max_staleness)
            return pb.SetPolicyResponse()

    def Reshard(self, request: pb.ReshardRequest, context: Context) -> pb.ReshardResponse:
        with answering(context):
            seconds, nbytes = self._service.reshard_requests.reshard(
                request.shards, wait_seconds(request.wait_ms)
            )
            return pb.ReshardResponse(seconds=seconds, nbytes=nbytes)

    def StopJob(self, request: pb.StopJobRequest, context: Context) -> pb.StopJobResponse:
        with answering(context):
            self._service.stop(request.reason[:MAX_REASON_CHARACTERS])
            return pb.StopJobResponse()

    # ---- other shards ----------------------------------------------------------------------------

    def LinkShard(
        self, requests: Iterator[pb.LinkShardRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.LinkShardResponse]:
        with answering(context):
            for make in serve_shard(
                self._service,
                _until_lost(requests),
                context.is_active,
                lambda action: when_ended(context, action),
            ):
                if (response := make()) is not None:
                    yield response


def _until_lost(requests: Iterator[pb.LinkShardRequest]) -> Iterator[pb.LinkShardRequest]:
    """Yield the requests of a call until it ends in any way."""
    with suppress(grpc.RpcError):  # the shard's process ended; its next call starts over
        yield from requests


def _received_values(values: Iterable[pb.ReportedValue]) -> list[ReportedValue]:
    return [received_value(v.name, v.value, v.version, v.age_seconds) for v in values]
