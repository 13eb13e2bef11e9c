"""Requests of workers under policy allreduce, and the size of what they send."""

from operator import attrgetter

from pscommon.core.limits import ALLREDUCE
from pscommon.core.model_spec import ModelSpec
from pscommon.optim import KINDS
from psproto.v1 import coordinator_pb2 as pb
from psserver.coordinator.service import CoordinatorService
from psserver.core.commands.worker_commands import AskForReduce
from psserver.core.coordinator.admission import push_nbytes, upload_nbytes
from psserver.core.job.reduction import NO_WEIGHTS
from psserver.waiting import Waiter


async def reduce(
    service: CoordinatorService, request: pb.ReduceRequest, waiter: Waiter
) -> pb.ReduceResponse:
    """Answer with a reduce round, with what it waits for, or whether a round is open."""
    service.check_job(request.job)
    if request.within:
        service.check_goes_on()
        with service.executor.step(quiet=True) as (recorder, now):
            recorder.coordinator.job.member(request.worker, now)
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


def largest_push_nbytes(spec: ModelSpec, shards: int, policy: str) -> int:
    """Return the bytes of the largest push on the shard with the largest part: under allreduce the
    gradients stay in the workers, and uploads have weights and optimizer state.
    """
    if policy != ALLREDUCE:
        return push_nbytes(spec, shards)
    states = max(len(KINDS[each.name].states) for each in spec.optimizers.values())
    return upload_nbytes(spec, shards, states)
