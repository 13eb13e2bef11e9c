"""What answers each request to the coordinator (proto/psproto/v1/coordinator.proto)."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from operator import attrgetter

import grpc

from pscommon.core.limits import MAX_REASON_CHARACTERS
from pscommon.telemetry import strict_json
from pscommon.tracing.recorder import server_spans
from pscommon.wire import requests as rows
from psproto.v1 import coordinator_pb2 as pb
from psserver.coordinator import heartbeats, worker_handlers
from psserver.coordinator.service import CoordinatorService
from psserver.coordinator.shard_stream import serve_shard
from psserver.coordinator.status import describe
from psserver.core.commands.worker_commands import AskForReduce
from psserver.core.job.reduction import NO_WEIGHTS
from psserver.process.handlers import Handlers, when_ended
from psserver.waiting import Waiter


def get_status(service: CoordinatorService, request: pb.GetStatusRequest) -> pb.GetStatusResponse:
    return pb.GetStatusResponse(status_json=strict_json.dumps(describe(service)))


async def save_snapshot(
    service: CoordinatorService, request: pb.SaveSnapshotRequest, waiter: Waiter
) -> pb.SaveSnapshotResponse:
    version = await waiter.do(partial(service.snapshot_scheduler.save, request.wait_ms / 1000))
    return pb.SaveSnapshotResponse(version=version, path=service.snapshots.path(version))


def drain(service: CoordinatorService, request: pb.DrainRequest) -> pb.DrainResponse:
    service.drain(request.worker)
    return pb.DrainResponse()


def scale_workers(
    service: CoordinatorService, request: pb.ScaleWorkersRequest
) -> pb.ScaleWorkersResponse:
    service.want_workers(request.workers, "ps-ctl scale")
    return pb.ScaleWorkersResponse()


async def restore_snapshot(
    service: CoordinatorService, request: pb.RestoreSnapshotRequest, waiter: Waiter
) -> pb.RestoreSnapshotResponse:
    await waiter.do(partial(service.restore, request.version, request.wait_ms / 1000))
    return pb.RestoreSnapshotResponse()


def set_policy(service: CoordinatorService, request: pb.SetPolicyRequest) -> pb.SetPolicyResponse:
    staleness = request.staleness if request.HasField("staleness") else None
    max_staleness = request.max_staleness if request.HasField("max_staleness") else None
    service.set_policy(request.policy, staleness, max_staleness)
    return pb.SetPolicyResponse()


async def reshard(
    service: CoordinatorService, request: pb.ReshardRequest, waiter: Waiter
) -> pb.ReshardResponse:
    seconds, nbytes = await waiter.do(
        partial(service.reshard_requests.reshard, request.shards, request.wait_ms / 1000)
    )
    return pb.ReshardResponse(seconds=seconds, nbytes=nbytes)


def stop_job(service: CoordinatorService, request: pb.StopJobRequest) -> pb.StopJobResponse:
    service.stop(request.reason[:MAX_REASON_CHARACTERS])
    return pb.StopJobResponse()


async def reduce(
    service: CoordinatorService, request: pb.ReduceRequest, waiter: Waiter
) -> pb.ReduceResponse:
    """Answer with a reduce round, with what it waits for, or whether a round is open."""
    service.check_job(request.job)
    if request.within:  # also answered while the server stops: a worker that leaves uploads
        with service.executor.step(quiet=True) as (recorder, _):
            reduction = recorder.coordinator.job.reduction
            return pb.ReduceResponse(
                open=reduction.open.number == request.within,
                uploaded=reduction.uploaded,
                generation=reduction.generation,
            )
    version = request.version if request.HasField("version") else NO_WEIGHTS
    command = AskForReduce(
        request.worker,
        request.number,
        version,
        request.samples,
        request.address,
        request.groups_json,
        request.is_partial,
        request.completed,
    )
    found = await service.executor.until(
        lambda recorder, now: recorder.do(command, now), request.wait_ms / 1000, waiter
    )
    if found is None:
        service.check_goes_on()
        service.first_workers.check()
        return pb.ReduceResponse(waiting_for=service.waiting_for)
    return pb.ReduceResponse(
        kind=found.kind,
        round=found.number,
        group=found.group,
        workers=found.workers,
        samples=[each.samples for each in found.requests],
        source=found.source,
        address=found.requests[0].address if found.requests else "",
        groups_json=min(found.requests, key=attrgetter("worker")).groups_json
        if found.requests
        else "",
        is_partial=any(each.is_partial for each in found.requests),
    )


def link_shard(
    service: CoordinatorService,
    requests: Iterator[pb.LinkShardRequest],
    context: grpc.ServicerContext,
) -> Iterator[pb.LinkShardResponse]:
    """Serve another shard over gRPC."""
    for make in serve_shard(
        service,
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


async def next_batch(
    service: CoordinatorService, request: pb.NextBatchRequest, waiter: Waiter
) -> pb.NextBatchResponse:
    began = server_spans.now()
    answer = await worker_handlers.next_batch(service, request, waiter)
    server_spans.add("lease", began, ((request.worker, 0),), request.received)
    return answer


_HANDLERS: dict[rows.AnyRequest, Callable[..., object]] = {
    rows.JOIN: worker_handlers.join,
    rows.REGISTER: worker_handlers.register,
    rows.HEARTBEAT: heartbeats.heartbeat,
    rows.REPORT_EXIT: worker_handlers.report_exit,
    rows.LEAVE: worker_handlers.leave,
    rows.NEXT_BATCH: next_batch,
    rows.RETURN_BATCHES: worker_handlers.return_batches,
    rows.COLLECTIVE: worker_handlers.collective,
    rows.REDUCE: reduce,
    rows.REPORT_METRICS: heartbeats.report_metrics,
    rows.GET_HISTORY: heartbeats.get_history,
    rows.GET_STATUS: get_status,
    rows.GET_TRACE: heartbeats.get_trace,
    rows.SAVE_SNAPSHOT: save_snapshot,
    rows.DRAIN: drain,
    rows.SCALE_WORKERS: scale_workers,
    rows.RESTORE_SNAPSHOT: restore_snapshot,
    rows.SET_POLICY: set_policy,
    rows.RESHARD: reshard,
    rows.STOP_JOB: stop_job,
    rows.LINK_SHARD: link_shard,
}


def coordinator_handlers(service: CoordinatorService) -> Handlers:
    """Return the handlers of the coordinator's requests, on shard 0."""
    return {row: partial(handler, service) for row, handler in _HANDLERS.items()}
