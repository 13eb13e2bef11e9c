"""Commands about the job: its settings, snapshots and continuation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from pscommon.core.errors import InvalidRequestError
from psserver.core.commands.command import Command
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.policy import policy
from psserver.core.job.settings import JobRules
from psserver.core.job.snapshot_schedule import PartReport


class PolicySettings(NamedTuple):
    """Arguments of `policy`."""

    name: str
    staleness: int | None = None
    max_staleness: int | None = None
    backup: int = 0


@dataclass(frozen=True, slots=True)
class SetPolicy(Command[None]):
    """Change the policy from the next update on."""

    wire_name: ClassVar[str] = "set_policy"
    settings: PolicySettings

    def perform(self, coordinator: CoordinatorMachine, now: float) -> None:
        coordinator.set_policy(policy(*self.settings), now)

    def as_json(self) -> Mapping[str, Any]:
        return {"row": list(self.settings)}

    @staticmethod
    def from_json(row: list[Any]) -> "SetPolicy":
        return SetPolicy(PolicySettings(*row))

    def check(self, coordinator: CoordinatorMachine) -> None:
        policy(*self.settings)


@dataclass(frozen=True, slots=True)
class WantWorkers(Command[None]):
    """Set the number of workers that the job wants; a launcher or an autoscaler follows it.

    Attributes:
        reason: Why, for the log.
    """

    wire_name: ClassVar[str] = "want_workers"
    workers: int
    reason: str

    def perform(self, coordinator: CoordinatorMachine, now: float) -> None:
        coordinator.job.workers_wanted = self.workers

    def check(self, coordinator: CoordinatorMachine) -> None:
        job = coordinator.job
        if not job.started and self.workers < job.min_workers:
            raise InvalidRequestError(
                f"{self.workers} workers refused: training starts with {job.min_workers} "
                "(`--min-workers`). Try: again once it has started"
            )


@dataclass(frozen=True, slots=True)
class UseRules(Command[None]):
    """Use the operator's settings after a restart of the servers."""

    wire_name: ClassVar[str] = "go_by"
    rules: JobRules

    def perform(self, coordinator: CoordinatorMachine, now: float) -> None:
        coordinator.use_rules(self.rules, now)

    def as_json(self) -> Mapping[str, Any]:
        return {"rules": self.rules.as_json()}

    @staticmethod
    def from_json(rules: dict[str, Any]) -> "UseRules":
        return UseRules(JobRules.from_json(rules))


@dataclass(frozen=True, slots=True)
class Advance(Command[None]):
    """Append the updates that waited for a Cut."""

    wire_name: ClassVar[str] = "advance"

    def perform(self, coordinator: CoordinatorMachine, now: float) -> None:
        coordinator.rounds.advance(now)


@dataclass(frozen=True, slots=True)
class StartCut(Command[bool]):
    """Start a snapshot; the reply is False while another one is written."""

    wire_name: ClassVar[str] = "cut"

    def perform(self, coordinator: CoordinatorMachine, now: float) -> bool:
        return coordinator.cut(now)


@dataclass(frozen=True, slots=True)
class RecordPart(Command[None]):
    """Record that a shard has written its part of a snapshot, or why it could not."""

    wire_name: ClassVar[str] = "part"
    shard: int
    part: PartReport

    def perform(self, coordinator: CoordinatorMachine, now: float) -> None:
        coordinator.cuts.part(self.shard, self.part)

    @staticmethod
    def from_json(shard: int, part: list[Any]) -> "RecordPart":
        return RecordPart(shard, PartReport(*part))


@dataclass(frozen=True, slots=True)
class FinishSnapshot(Command[None]):
    """Record that the manifest of the finished snapshot is written, or failed."""

    wire_name: ClassVar[str] = "filed"

    def perform(self, coordinator: CoordinatorMachine, now: float) -> None:
        coordinator.cuts.finished = None


@dataclass(frozen=True, slots=True)
class ContinueJob(Command[None]):
    """Continue in a new process after a replay.

    Attributes:
        generation: Number of this start of the servers.
        resumes: The next worker may begin another run.
    """

    wire_name: ClassVar[str] = "recovered"
    generation: int
    resumes: bool = False

    def perform(self, coordinator: CoordinatorMachine, now: float) -> None:
        coordinator.recovered(now, self.generation, self.resumes)

    def as_json(self) -> Mapping[str, Any]:
        resumes = {"resumes": True} if self.resumes else {}
        return {"generation": self.generation, **resumes}
