"""Requests of workers: they join, register, ask for batches, return them, and leave.

Their heartbeats are in heartbeats.py.
"""

import time
from typing import Literal

from pscommon.core.data_loop import LoopSpec
from pscommon.core.data_stream import Spec
from pscommon.core.errors import InvalidRequestError
from pscommon.core.formats import check_wire_format, spoken_format
from pscommon.core.limits import (
    MAX_NAME_CHARACTERS,
    MAX_REASON_CHARACTERS,
    WORKERS_PER_GENERATION,
)
from pscommon.core.model_spec import ModelSpec
from pscommon.core.script_place import PassName
from pscommon.optim import KINDS
from pscommon.optim.specs import check_numbers, validate_model
from pscommon.snapshot.tensor_file import RESERVED
from pscommon.system.process_limits import usable_memory
from pscommon.telemetry.logs import get_logger
from pscommon.wire.messages import (
    batches_from_proto,
    loop_from_proto,
    model_from_proto,
    model_to_proto,
    place_from_proto,
)
from psproto.v1 import coordinator_pb2 as pb
from psserver.coordinator.heartbeats import report_beside, standing
from psserver.coordinator.service import CoordinatorService
from psserver.core.commands.data_commands import CallCollective, LeaseBatches, ReturnBatches
from psserver.core.commands.recorder import Recorder
from psserver.core.commands.request_checks import check_memory
from psserver.core.commands.waiting import MAX_NAMED_COUNT, waiting_for_call
from psserver.core.commands.worker_commands import Join, Leave, Register
from psserver.core.coordinator.admission import check_registration, largest_push_nbytes
from psserver.core.coordinator.data_requests import BatchesReply
from psserver.core.coordinator.registration import RegistrationReply
from psserver.core.data.data_ledger import DataLedger
from psserver.core.workers.collectives import NULL, CollectiveValues
from psserver.core.workers.members import Member
from psserver.durability.snapshots import groups_of
from psserver.monitoring.wait_notices import log_changed_hyper_parameters
from psserver.waiting import Waiter

log = get_logger(__name__)

BEGIN: Literal["begin"] = "begin"
"""In place of a member: the worker's training begins first."""


async def join(
    service: CoordinatorService, request: pb.JoinRequest, waiter: Waiter
) -> pb.JoinResponse:
    check_wire_format(request.format, "the worker", "the server")
    service.check_job(request.job)
    rank = request.rank if request.HasField("rank") else None
    command = Join(
        rank, request.host, request.pid, request.device, request.attempt, request.training
    )
    member = await add_member(service, command, request.wait_ms / 1000, waiter)
    if member is None:
        return pb.JoinResponse(
            waiting_for=_waiting_to_join(service, request.training), format=spoken_format()
        )
    service.worker_exits.learn(member.worker, request.process[:MAX_NAME_CHARACTERS])
    coordinator = service.executor.coordinator
    return pb.JoinResponse(
        job=service.job,
        worker=member.worker,
        addresses=service.directory.addresses,
        lease_ms=round(service.config.lease * 1000),
        policy=service.policy,
        open_loop=coordinator.ledger.open_loop,
        known_loops=coordinator.ledger.known_loops,
        open_loops=coordinator.ledger.open_loops,
        loaders=[
            pb.LoaderPasses(loader=loader, begun=begun, open=still_open)
            for loader, (begun, still_open) in service.passes_begun().items()
        ],
        bad_gradients=service.config.bad_gradients,
        standbys=service.directory.standbys,
        format=spoken_format(),
        training=coordinator.job.trainings.current,
        key=service.worker_keys.key_of(member.worker),
        **standing(service, member.worker),
    )


async def add_member(
    service: CoordinatorService, command: Join, seconds: float, waiter: Waiter
) -> Member | None:
    """Add a worker to the job, and begin its training once the current one has no member.

    Returns:
        The member; None: after `seconds` the current training still has members.

    Raises:
        InvalidRequestError: This server serves --max-workers already, or no other training.
        TrainingOver: The worker's training is over.
    """
    executor = service.executor
    admitted = executor.coordinator.job.trainings.admits(command.training)
    if not admitted and service.config.exit_when_done:
        raise InvalidRequestError(
            f"training {command.training!r} refused: with `--exit-when-done` the servers end "
            "after the job's first training. Try: start them without it, and `ps-ctl stop` at "
            "the end"
        )
    service.check_goes_on()
    max_workers = service.config.max_workers or 1

    def admit(recorder: Recorder, now: float) -> Member | Literal["begin"] | None:
        return _admit(recorder, command, max_workers, now)

    with executor.step() as (recorder, now):
        member = admit(recorder, now)
    if member is None:
        member = await executor.until(admit, seconds, waiter)
    if member is BEGIN:
        service.history.begin_training(command.training)
        return await add_member(service, command, seconds, waiter)
    if not isinstance(member, Member):
        return None
    service.snapshots.generations.reserve((member.worker - 1) // WORKERS_PER_GENERATION)
    log.info(
        "worker_joined",
        worker=member.worker,
        rank=member.rank,
        training=executor.coordinator.job.trainings.current,
        host=member.host,
        pid=member.pid,
    )
    return member


def _admit(
    recorder: Recorder, command: Join, max_workers: int, now: float
) -> Member | Literal["begin"] | None:
    """Join, unless there are too many others; one with this rank is replaced.

    Return BEGIN to a worker whose training may begin, and None to one that has to wait.

    max_workers: Workers at a time.
    """
    coordinator = recorder.coordinator
    current = coordinator.membership.current()
    if not coordinator.job.trainings.admits(command.training):
        return None if current or coordinator.job.reshard is not None else BEGIN
    others = [m for m in current if command.rank is None or m.rank != command.rank]
    if len(others) >= max_workers:
        raise InvalidRequestError(
            f"the job has {len(others)} workers, and shard 0 serves at most "
            f"{max_workers}. Try: fewer workers, or a larger `--max-workers` and a "
            "larger limit of open files (ulimit -n)"
        )
    return recorder.do(command, now)


def _waiting_to_join(service: CoordinatorService, training: str) -> str:
    """Return a phrase for people about the workers that the next training waits for."""
    coordinator = service.executor.coordinator
    members = coordinator.membership.current()
    named = ", ".join(map(str, members[:MAX_NAMED_COUNT])) or "a reshard"
    current = coordinator.job.trainings.current
    return f"the end of training {current!r} before {training!r} can begin: {named}"


async def register(
    service: CoordinatorService, request: pb.RegisterRequest, waiter: Waiter
) -> pb.RegisterResponse:
    service.check_job(request.job)
    worker, answer = request.worker, pb.RegisterResponse
    if request.observe:  # the model, once there are weights
        worker, state = 0, answer.STATE_READY if service.begun else answer.STATE_PENDING
    else:
        spec = validate_model(model_from_proto(request.model))
        for settings, tensors in spec.parts().values():
            check_numbers(settings, tensors)
        command = Register(worker, spec, request.seed)
        reply = await _register(service, command, request.wait_ms / 1000, waiter)
        states = {"ready": answer.STATE_READY, "upload": answer.STATE_UPLOAD}
        state = states.get(reply, answer.STATE_PENDING)
    if state == answer.STATE_PENDING:
        return answer(state=state, waiting_for=service.waiting_for)
    plan, job = service.plan, service.executor.coordinator.job
    return answer(
        state=state,
        model=model_to_proto(plan.spec),
        plan_digest=plan.digest,
        version=service.version,
        groups_json=groups_of(service.engine.live.store),
        updates=job.updates,
        seed=job.seed,
        **standing(service, worker),
    )


async def _register(
    service: CoordinatorService, command: Register, seconds: float, waiter: Waiter
) -> RegistrationReply:
    """Register a worker's model; wait up to `seconds` while the answer is pending.

    Raises:
        MismatchError: The job trains another model.
        InvalidRequestError: No file or server can hold the model.
    """
    executor, worker, spec = service.executor, command.worker, command.spec
    shards, asked = executor.coordinator.job.shards, time.monotonic()
    check_memory(spec, shards, usable_memory())
    states = max(len(KINDS[each.name].states) for each in spec.optimizers.values())
    nbytes = largest_push_nbytes(executor.coordinator.job.policy, spec, shards, states)

    def ask(recorder: Recorder, now: float) -> RegistrationReply | None:
        coordinator = recorder.coordinator
        check_registration(coordinator, worker, nbytes, service.config.in_flight)
        if coordinator.registration.unresolved_peer(worker, asked):
            coordinator.job.member(worker, now)
            return None
        if coordinator.job.model is None:
            check_tensor_names(spec)
        before = coordinator.job.model
        state = recorder.do(command, now)
        log_changed_hyper_parameters(before, coordinator.job.model)
        return None if state == "pending" else state

    answer: RegistrationReply | None = await executor.until(ask, seconds, waiter)
    if (model := executor.coordinator.job.model) is not None:
        service.engine.set_model(model)
    return answer or "pending"


def check_tensor_names(spec: ModelSpec) -> None:
    """Check that a snapshot file can hold the names of a new model's tensors.

    Raises:
        InvalidRequestError: A tensor has a reserved name.
    """
    if any(RESERVED in (tensor.name, *tensor.aliases) for tensor in spec.tensors):
        raise InvalidRequestError(
            f"cannot register the model: a tensor is named {RESERVED}, which safetensors files "
            "reserve. Try: rename this parameter or buffer"
        )


def leave(service: CoordinatorService, request: pb.LeaveRequest) -> pb.LeaveResponse:
    service.check_job(request.job)
    report_beside(service, request.worker, request.values)
    worker, reason, executor = request.worker, request.reason, service.executor
    if request.lost:
        service.worker_exits.lose(worker, reason[:MAX_REASON_CHARACTERS])
        return pb.LeaveResponse()
    with executor.changed:
        missed = never_begun(executor.coordinator.ledger, worker) if not reason else {}
    executor.do(Leave(worker, reason[:MAX_REASON_CHARACTERS]))
    for name, batches in missed.items():
        log.warning(
            "pass_not_begun",
            worker=worker,
            loader=name.loader,
            pass_number=name.number,
            batches=batches,
            reason="the worker is done and never began this pass; its share was not read",
            remedy="begin the pass on all workers; for a pass of one worker use torch's DataLoader",
        )
    service.history.count_lost_updates(worker, request.version)
    service.metrics.remove_worker(worker)
    log.info("worker_left", worker=worker, reason=reason or "done")
    return pb.LeaveResponse()


def never_begun(ledger: DataLedger, worker: int) -> dict[PassName, int]:
    """Return passes that another worker has completed and this one has not begun, each with the
    number of batches that were for this one.
    """
    return {
        loop.name: len(ready)
        for loop in ledger.live.values()
        if (ready := loop.leases.ready(worker))
        and loop.name
        and loop.was_left
        and not loop.leases.has_asked(worker)
    }


def report_exit(
    service: CoordinatorService, request: pb.ReportExitRequest
) -> pb.ReportExitResponse:
    process = request.process[:MAX_NAME_CHARACTERS]
    reason = request.reason[:MAX_REASON_CHARACTERS]
    return pb.ReportExitResponse(workers=service.worker_exits.report(process, reason))


async def next_batch(
    service: CoordinatorService, request: pb.NextBatchRequest, waiter: Waiter
) -> pb.NextBatchResponse:
    """Answer with batches or the end of the data, or with what they wait for.

    A job that is over has no more batches. If only this server stops, batches follow after its
    restart.
    """
    service.check_job(request.job)
    spec = loop_from_proto(request.loop)
    if request.share_only:
        return pb.NextBatchResponse(share=_share(service, request.worker, spec))
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
    batches = await service.executor.until(
        lambda recorder, now: recorder.do(command, now),
        request.wait_ms / 1000,
        waiter,
        worker=command.worker,
    )
    if batches is None and service.is_over:
        batches = BatchesReply(end=True)
    if batches is None:
        service.check_goes_on()
        service.first_workers.check()
        return pb.NextBatchResponse(
            waiting_for=service.waiting_for,
            version=service.version,
            weights_wanted=service.wants_weights,
        )
    answer = pb.NextBatchResponse(
        numbers=batches.numbers,
        end=batches.end,
        version=service.version,
        following=batches.following,
        share=0 if request.received else _share(service, request.worker, spec),
    )
    if place is not None and batches.spec is not None:
        answer.loop = batches.spec.loop
        if isinstance(batches.spec, LoopSpec):
            answer.first_epoch = batches.spec.first_epoch
    return answer


def _share(service: CoordinatorService, worker: int, spec: Spec) -> int:
    """Return the number of batches that the worker can expect (see DataRequests.share)."""
    with service.executor.step(quiet=True) as (recorder, _):
        return recorder.coordinator.data.share(worker, spec)


def return_batches(
    service: CoordinatorService, request: pb.ReturnBatchesRequest
) -> pb.ReturnBatchesResponse:
    """Take batches back that a worker will not push."""
    service.check_job(request.job)
    batches = list(batches_from_proto(request.batches))
    service.executor.do(ReturnBatches(request.worker, batches, request.used))
    return pb.ReturnBatchesResponse()


async def collective(
    service: CoordinatorService, request: pb.CollectiveRequest, waiter: Waiter
) -> pb.CollectiveResponse:
    """Answer with the result of a collective call, or with the workers that it waits for."""
    service.check_job(request.job)
    given = CollectiveValues(
        request.kind,
        tuple(request.names),
        tuple(request.values),
        request.samples,
        request.json or NULL,
    )
    place = place_from_proto(request.place) if request.HasField("place") else None
    command = CallCollective(request.worker, request.number, given, request.first_open, place)
    result = await service.executor.until(
        lambda recorder, now: recorder.do(command, now),
        request.wait_ms / 1000,
        waiter,
        worker=command.worker,
    )
    if result is None:
        service.check_goes_on()
        service.first_workers.check()
        with service.executor.step(quiet=True) as (recorder, now):
            waiting = waiting_for_call(recorder.coordinator, command.key, now)
        return pb.CollectiveResponse(
            waiting_for=waiting or service.waiting_for, weights_wanted=service.wants_weights
        )
    return pb.CollectiveResponse(
        done=True, values=result.values, json=result.text, version=service.version
    )
