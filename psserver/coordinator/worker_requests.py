"""Requests of workers: they join, register, ask for batches, return them, and leave."""

import time
from collections.abc import Callable, Mapping
from typing import Literal

from pscommon.core.data_stream import Spec
from pscommon.core.errors import InvalidRequestError
from pscommon.core.limits import MAX_REASON_CHARACTERS, WORKERS_PER_GENERATION
from pscommon.core.model_spec import ModelSpec
from pscommon.core.script_place import PassName
from pscommon.snapshot.tensor_file import RESERVED
from pscommon.system.process_limits import usable_memory
from pscommon.telemetry.logs import get_logger
from psserver.coordinator.executor import CommandExecutor
from psserver.coordinator.job_start import JobStart
from psserver.core.commands.data_commands import CallCollective, LeaseBatches, ReturnBatches
from psserver.core.commands.recorder import Recorder
from psserver.core.commands.request_checks import check_memory
from psserver.core.commands.waiting import MAX_NAMED_COUNT, waiting_for_call
from psserver.core.commands.worker_commands import Join, Leave, Register
from psserver.core.coordinator.admission import check_registration, push_nbytes
from psserver.core.coordinator.data_requests import BatchesReply
from psserver.core.coordinator.registration import RegistrationReply
from psserver.core.data.data_ledger import DataLedger
from psserver.core.reports.collectives import CallKey, CollectiveValues
from psserver.core.workers.members import Member
from psserver.durability.snapshots import SnapshotManager
from psserver.monitoring.first_workers import FirstWorkers
from psserver.monitoring.wait_notices import log_changed_hyper_parameters
from psserver.process.metrics import ServerMetrics
from psserver.shard.engine import ShardEngine
from psserver.waiting import Waiter

log = get_logger(__name__)

BEGIN: Literal["begin"] = "begin"
"""In place of a member: the worker's training begins first."""


class WorkerRequests:
    """Answers workers. All methods may be called from any thread.

    Args:
        in_flight: Bytes of pushes that a server may hold.
        max_workers: Workers at a time.
        first_workers: Checks the wait for --min-workers.
        check_goes_on: Raises UnreachableError if this server stops.
        is_over: Returns whether the job ends with this server.
        exit_when_done: The servers end after the first training.
    """

    def __init__(
        self,
        executor: CommandExecutor,
        engine: ShardEngine,
        in_flight: int,
        max_workers: int,
        history: JobStart,
        snapshots: SnapshotManager,
        metrics: ServerMetrics,
        first_workers: FirstWorkers,
        check_goes_on: Callable[[], None],
        is_over: Callable[[], bool],
        exit_when_done: bool,
    ) -> None:
        self._executor, self._engine, self._in_flight = executor, engine, in_flight
        self._max_workers = max_workers
        self._history, self._snapshots, self._metrics = history, snapshots, metrics
        self._first_workers, self._check_goes_on = first_workers, check_goes_on
        self._is_over, self._exit_when_done = is_over, exit_when_done

    async def join(self, command: Join, seconds: float, waiter: Waiter) -> Member | None:
        """Add a worker to the job, and begin its training once the current one has no member.

        Returns:
            The member; None: after `seconds` the current training still has members.

        Raises:
            InvalidRequestError: This server serves --max-workers already, or no other training.
            TrainingOver: The worker's training is over.
        """
        admitted = self._executor.coordinator.job.trainings.admits(command.training)
        if not admitted and self._exit_when_done:
            raise InvalidRequestError(
                f"training {command.training!r} refused: with `--exit-when-done` the servers end "
                "after the job's first training. Try: start them without it, and `ps-ctl stop` at "
                "the end"
            )
        self._check_goes_on()
        with self._executor.step() as (recorder, now):
            member = self._admit(recorder, command, now)
        if member is None:
            member = await self._executor.until(
                lambda recorder, now: self._admit(recorder, command, now), seconds, waiter
            )
        if member is BEGIN:
            self._history.begin_training(command.training)
            return await self.join(command, seconds, waiter)
        if not isinstance(member, Member):
            return None
        self._snapshots.generations.reserve((member.worker - 1) // WORKERS_PER_GENERATION)
        worker, rank = member.worker, member.rank
        training = self._executor.coordinator.job.trainings.current
        where = {"host": member.host, "pid": member.pid}
        log.info("worker_joined", worker=worker, rank=rank, training=training, **where)
        return member

    def _admit(
        self, recorder: Recorder, command: Join, now: float
    ) -> Member | Literal["begin"] | None:
        """Join, unless there are too many others; one with this rank is replaced.

        Return BEGIN to a worker whose training may begin, and None to one that has to wait.
        """
        coordinator = recorder.coordinator
        current = coordinator.membership.current()
        if not coordinator.job.trainings.admits(command.training):
            return None if current or coordinator.reshard is not None else BEGIN
        others = [m for m in current if command.rank is None or m.rank != command.rank]
        if len(others) >= self._max_workers:
            raise InvalidRequestError(
                f"the job has {len(others)} workers, and shard 0 serves at most "
                f"{self._max_workers}. Try: fewer workers, or a larger `--max-workers` and a "
                "larger limit of open files (ulimit -n)"
            )
        return recorder.do(command, now)

    def waiting_to_join(self, training: str) -> str:
        """Return a phrase for people about the workers that the next training waits for."""
        members = self._executor.coordinator.membership.current()
        current = self._executor.coordinator.job.trainings.current
        named = ", ".join(map(str, members[:MAX_NAMED_COUNT])) or "a reshard"
        return f"the end of training {current!r} before {training!r} can begin: {named}"

    async def register(
        self, command: Register, seconds: float, waiter: Waiter
    ) -> RegistrationReply:
        """Register a worker's model; wait up to `seconds` while the answer is pending.

        Raises:
            MismatchError: The job trains another model.
            InvalidRequestError: No file or server can hold the model.
        """
        worker, spec = command.worker, command.spec
        shards, asked = self._executor.coordinator.shards, time.monotonic()
        check_memory(spec, shards, usable_memory())
        nbytes = push_nbytes(spec, shards)

        def ask(recorder: Recorder, now: float) -> RegistrationReply | None:
            coordinator = recorder.coordinator
            check_registration(coordinator, worker, nbytes, self._in_flight)
            if coordinator.registration.unresolved_peer(worker, asked):
                coordinator.job.member(worker, now)
                return None
            if coordinator.model is None:
                check_tensor_names(spec)
            before = coordinator.model
            state = recorder.do(command, now)
            log_changed_hyper_parameters(before, coordinator.model)
            return None if state == "pending" else state

        answer: RegistrationReply | None = await self._executor.until(ask, seconds, waiter)
        if (model := self._executor.coordinator.model) is not None:
            self._engine.set_model(model)
        return answer or "pending"

    def leave(self, worker: int, reason: str, version: int) -> None:
        """Remove a worker that leaves.

        Args:
            version: The newest version that the worker knows.
        """
        with self._executor.changed:
            missed = never_begun(self._executor.coordinator.ledger, worker) if not reason else {}
        self._executor.do(Leave(worker, reason[:MAX_REASON_CHARACTERS]))
        for name, batches in missed.items():
            log.warning(
                "pass_not_begun",
                worker=worker,
                loader=name.loader,
                pass_number=name.number,
                batches=batches,
                reason="the worker is done and never began this pass; its share was not read",
                remedy="begin the pass on all workers; for a pass of one worker use torch's "
                "DataLoader",
            )
        self._history.count_lost_updates(worker, version)
        self._metrics.remove_worker(worker)
        log.info("worker_left", worker=worker, reason=reason or "done")

    def renew_leases(self, ages: Mapping[int, float]) -> None:
        """Renew leases from the last transfer; `ages` has the seconds since then by worker."""
        with self._executor.step(quiet=True) as (recorder, now):
            recorder.coordinator.membership.leases.renew_by_transfers(ages, now)

    async def lease_batches(
        self, command: LeaseBatches, seconds: float, waiter: Waiter
    ) -> BatchesReply | None:
        """Return batches, or the end of the data; None if there are none within `seconds`.

        A job that is over has no more batches. If only this server stops, batches follow after
        its restart.
        """
        answer = await self._executor.until(
            lambda recorder, now: recorder.do(command, now),
            seconds,
            waiter,
            worker=command.worker,
        )
        if answer is None and self._is_over():
            return BatchesReply(end=True)
        if answer is None:
            self._check_goes_on()
            self._first_workers.check()
        return answer

    def return_batches(self, command: ReturnBatches) -> None:
        """Take batches back that a worker will not push."""
        self._executor.do(command)

    async def call_collective(
        self, command: CallCollective, seconds: float, waiter: Waiter
    ) -> CollectiveValues | None:
        """Return the result of a collective call; None if workers are missing after `seconds`."""
        answer = await self._executor.until(
            lambda recorder, now: recorder.do(command, now),
            seconds,
            waiter,
            worker=command.worker,
        )
        if answer is None:
            self._check_goes_on()
            self._first_workers.check()
        return answer

    def waiting_for_call(self, key: CallKey) -> str:
        """Return a phrase for people about the workers that a collective call waits for."""
        with self._executor.step(quiet=True) as (recorder, now):
            return waiting_for_call(recorder.coordinator, key, now)

    def share(self, worker: int, spec: Spec) -> int:
        """Return the number of batches that the worker can expect (see DataRequests.share)."""
        with self._executor.step(quiet=True) as (recorder, _):
            return recorder.coordinator.data.share(worker, spec)


def never_begun(ledger: DataLedger, worker: int) -> dict[PassName, int]:
    """Return passes that another worker has completed and this one has not begun, each with the
    number of batches that were for this one.
    """
    return {
        loop.name: len(ready)
        for loop in ledger.live()
        if (ready := loop.leases.ready(worker))
        and loop.name
        and loop.was_left
        and not loop.leases.has_asked(worker)
    }


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
