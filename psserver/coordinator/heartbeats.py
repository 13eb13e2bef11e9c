"""Heartbeats of workers, and the values that they report."""

import time
from collections.abc import Iterable
from typing import Any

from pscommon.core.errors import FencedError, InvalidRequestError
from pscommon.core.limits import MAX_NAME_CHARACTERS
from pscommon.telemetry.logs import get_logger
from psproto.v1 import coordinator_pb2 as pb
from psserver.coordinator.service import CoordinatorService
from psserver.core.commands.data_commands import ReportValues
from psserver.core.workers.members import WorkerHeartbeat
from psserver.core.workers.reported_values import ReportedValue

MAX_AGE_SECONDS = 60.0
"""An older value counts as reported this long ago: workers keep only the newest value of each
name.
"""

log = get_logger(__name__)


def heartbeat(service: CoordinatorService, request: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
    """Record what a worker reports of itself.

    Raises:
        FencedError: The worker is no longer a member.
        PSError: The error with which the job failed.
    """
    service.check_job(request.job)
    beat = WorkerHeartbeat(
        request.step_seconds,
        request.samples_per_second,
        request.phase[:MAX_NAME_CHARACTERS],
        request.no_call_seconds,
        phase_seconds(request.phases),
    )
    with service.executor.step(quiet=True) as (recorder, now):
        member = recorder.coordinator.job.member(request.worker, now)
        member.heartbeat = beat
        is_draining = member.draining
    if service.failure is not None:
        raise service.failure
    is_over, numbers = service.is_over, standing(service, request.worker)
    report_beside(service, request.worker, request.values)
    service.tracing.add("worker", request.worker, request.spans)
    service.worker_exits.learn(request.worker, request.process[:MAX_NAME_CHARACTERS])
    directory = service.directory
    return pb.HeartbeatResponse(
        version=service.version,
        stopping=is_over,
        draining=is_draining,
        addresses=directory.served,
        terms=directory.terms,
        standbys=directory.standbys,
        policy=service.policy,
        trace=service.tracing.is_wanted,
        clock=time.monotonic(),
        **numbers,
    )


def phase_seconds(phases: pb.PhaseSeconds) -> dict[str, float]:
    """Return a worker's seconds by phase, as the status shows them."""
    return {
        "data": phases.data,
        "compute": phases.compute,
        "push": phases.push,
        "wait": phases.wait,
        "apply": phases.apply,
        "pull": phases.pull,
    }


def standing(service: CoordinatorService, worker: int) -> dict[str, Any]:
    """Return the fields of an answer that say which worker this one is.

    `workers` is the number of registered workers; before training starts of current workers, at
    least --min-workers. `first`: This is the first of them; before training starts: its rank is 0.
    """
    with service.executor.step(quiet=True) as (recorder, _):
        job = recorder.coordinator.job
        awaited = 0 if job.started else job.min_workers
        workers, is_first = job.membership.count_and_is_first(worker, awaited)
    return {"workers": workers, "first": is_first}


def report_metrics(
    service: CoordinatorService, request: pb.ReportMetricsRequest
) -> pb.ReportMetricsResponse:
    service.check_job(request.job)
    plain = [
        pb.ReportedValue(name=name, value=value, version=service.version)
        for name, value in request.metrics.items()
    ]
    _report(service, request.worker, [*plain, *request.values])
    return pb.ReportMetricsResponse()


def _report(service: CoordinatorService, worker: int, values: Iterable[pb.ReportedValue]) -> None:
    """Record reported values.

    Raises:
        InvalidRequestError: A name is too long, or there are too many names.
    """
    now = time.time()
    newest = {sent.name: sent for sent in values}
    taken = [
        ReportedValue(
            sent.name,
            sent.value,
            sent.version,
            now - min(max(0.0, sent.age_seconds), MAX_AGE_SECONDS),
        )
        for sent in newest.values()
    ]
    if taken:
        service.executor.do(ReportValues(worker, taken), quiet=True)


def report_beside(
    service: CoordinatorService, worker: int, values: Iterable[pb.ReportedValue]
) -> None:
    """Record the values sent with another request, which must not fail because of them."""
    try:
        _report(service, worker, values)
    except (FencedError, InvalidRequestError) as error:
        log.warning("reported_values_dropped", limited=True, worker=worker, problem=str(error))


def get_trace(service: CoordinatorService, request: pb.GetTraceRequest) -> pb.GetTraceResponse:
    return service.tracing.answer(request)


def get_history(
    service: CoordinatorService, request: pb.GetHistoryRequest
) -> pb.GetHistoryResponse:
    with service.executor.step(quiet=True) as (recorder, _):
        rows = recorder.coordinator.reported.history.rows()
    return pb.GetHistoryResponse(rows=[pb.HistoryRow(**row._asdict()) for row in rows])
