"""Commands about the membership of workers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pscommon.core.model_spec import ModelSpec, model_from_json, model_to_json
from psserver.core.commands.command import Command
from psserver.core.commands.request_checks import check_names
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.coordinator.registration import RegistrationReply
from psserver.core.job.reduction import ReduceRequest, ReduceRound
from psserver.core.workers.members import Member


@dataclass(frozen=True, slots=True)
class Join(Command[Member]):
    """Add a worker. No round waits for it before it has registered.

    Attributes:
        rank: The rank that its launcher gave it; None: by its number.
        attempt: How often its launcher had started it before.
        training: Name of its training; empty: the current one.
    """

    wire_name: ClassVar[str] = "join"
    rank: int | None
    host: str
    pid: int
    device: str
    attempt: int = 0
    training: str = ""

    def perform(self, coordinator: CoordinatorMachine, now: float) -> Member:
        coordinator.job.trainings = coordinator.job.trainings.named(self.training)
        return coordinator.membership.join(
            now, self.rank, self.host, self.pid, self.device, self.attempt
        )

    def as_json(self) -> Mapping[str, Any]:
        return {
            "rank": self.rank,
            "host": self.host,
            "pid": self.pid,
            "device": self.device,
            "attempt": self.attempt,
            **({"training": self.training} if self.training else {}),
        }

    def check(self, coordinator: CoordinatorMachine) -> None:
        check_names("join", (self.host, self.device, self.training))


@dataclass(frozen=True, slots=True)
class Register(Command[RegistrationReply]):
    """Register a worker with its model.

    Attributes:
        seed: The job's seed, if this worker is the first.
    """

    wire_name: ClassVar[str] = "register"
    worker: int
    spec: ModelSpec
    seed: int = 0

    def perform(self, coordinator: CoordinatorMachine, now: float) -> RegistrationReply:
        return coordinator.registration.register(self.worker, self.spec, now, self.seed)

    def as_json(self) -> Mapping[str, Any]:
        seed = {"seed": self.seed} if self.seed else {}
        return {"worker": self.worker, "spec": model_to_json(self.spec), **seed}

    @staticmethod
    def from_json(worker: int, spec: dict[str, Any], seed: int = 0) -> "Register":
        return Register(worker, model_from_json(spec), seed)


@dataclass(frozen=True, slots=True)
class AskForReduce(ReduceRequest, Command[ReduceRound | None]):
    """Ask for a reduce round; the reply None means that other workers are missing.

    It is in no log on disk: policy allreduce excludes `--durability log`.
    """

    wire_name: ClassVar[str] = "reduce"

    def perform(self, coordinator: CoordinatorMachine, now: float) -> ReduceRound | None:
        return coordinator.reduction.ask(self, now)

    def check(self, coordinator: CoordinatorMachine) -> None:
        check_names(f"reduce request {self.number}", (self.address,))


@dataclass(frozen=True, slots=True)
class Leave(Command[None]):
    """Remove a worker that is done (empty reason) or gives up."""

    wire_name: ClassVar[str] = "leave"
    worker: int
    reason: str

    def perform(self, coordinator: CoordinatorMachine, now: float) -> None:
        coordinator.registration.leave(self.worker, self.reason, now)


@dataclass(frozen=True, slots=True)
class DrainWorker(Command[None]):
    """Ask a worker to leave after its current step."""

    wire_name: ClassVar[str] = "drain"
    worker: int

    def perform(self, coordinator: CoordinatorMachine, now: float) -> None:
        coordinator.registration.drain(self.worker)


@dataclass(frozen=True, slots=True)
class KeepPlace(Command[None]):
    """Keep the place of a worker whose lease has ended."""

    wire_name: ClassVar[str] = "missing"
    worker: int

    def perform(self, coordinator: CoordinatorMachine, now: float) -> None:
        coordinator.membership.members[self.worker].missing_since = now


@dataclass(frozen=True, slots=True)
class EndAbsence(Command[None]):
    """Note that a missing worker has shown a sign of life."""

    wire_name: ClassVar[str] = "back"
    worker: int

    def perform(self, coordinator: CoordinatorMachine, now: float) -> None:
        coordinator.membership.members[self.worker].missing_since = None


@dataclass(frozen=True, slots=True)
class Lose(Command[None]):
    """Remove a worker whose lease has ended."""

    wire_name: ClassVar[str] = "lose"
    worker: int
    reason: str

    def perform(self, coordinator: CoordinatorMachine, now: float) -> None:
        coordinator.registration.lose(self.worker, self.reason, now)


@dataclass(frozen=True, slots=True)
class ForgetDeparted(Command[None]):
    """Forget all but the newest departed members."""

    wire_name: ClassVar[str] = "forget_departed"
    keep: int

    def perform(self, coordinator: CoordinatorMachine, now: float) -> None:
        coordinator.participation.forget_departed(self.keep)
