"""Commands about shards: their reports, processes and new parts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pscommon.core.log_entries import Measured, ShardReport
from psserver.core.commands.command import Command
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.pending_pushes import staged_from_json, staged_to_json


@dataclass(frozen=True, slots=True)
class ProcessReport(Command[None]):
    """Process a shard's report that has news."""

    wire_name: ClassVar[str] = "report"
    report: ShardReport

    def perform(self, coordinator: CoordinatorMachine, now: float) -> None:
        coordinator.reports.process(self.report, now)

    def as_json(self) -> Mapping[str, Any]:
        report = self.report
        staged = staged_to_json(report.staged)
        measured = [list(report.measured)] if report.measured is not None else []
        return {"report": [report.shard, report.log_id, report.index, staged, *measured]}

    @staticmethod
    def from_json(report: list[Any]) -> "ProcessReport":
        shard, log_id, index, staged, *measured = report
        pushes = tuple(staged_from_json(staged))
        answer = Measured(*measured[0]) if measured else None
        return ProcessReport(ShardReport(shard, log_id, index, pushes, measured=answer))


@dataclass(frozen=True, slots=True)
class RefusePush(Command[None]):
    """Reject a push that cannot be applied.

    Attributes:
        reason: Reason of its Reject entry.
        detail: Explanation for people.
    """

    wire_name: ClassVar[str] = "refuse_push"
    worker: int
    seq: int
    reason: str
    detail: str

    def perform(self, coordinator: CoordinatorMachine, now: float) -> None:
        coordinator.reports.refuse(self.worker, self.seq, self.reason, self.detail, now)


@dataclass(frozen=True, slots=True)
class AddFollower(Command[None]):
    """Note that a shard follows the current log."""

    wire_name: ClassVar[str] = "follows"
    shard: int

    def perform(self, coordinator: CoordinatorMachine, now: float) -> None:
        coordinator.job.followers.add(self.shard)


@dataclass(frozen=True, slots=True)
class RestartShard(Command[None]):
    """Note that a shard's process is new and may be behind its earlier reports."""

    wire_name: ClassVar[str] = "reborn"
    shard: int

    def perform(self, coordinator: CoordinatorMachine, now: float) -> None:
        coordinator.resharding.restart_shard(self.shard)


@dataclass(frozen=True, slots=True)
class DropShardReports(Command[None]):
    """Drop what a shard had reported: its process is new and has nothing staged."""

    wire_name: ClassVar[str] = "shard_lost"
    shard: int

    def perform(self, coordinator: CoordinatorMachine, now: float) -> None:
        coordinator.pending.shard_lost(self.shard)


@dataclass(frozen=True, slots=True)
class StartReshard(Command[bool]):
    """Start a reshard; the reply is False if it is not possible now.

    Attributes:
        shards: New number of shards.
        writes_snapshot: Whether it ends with a snapshot.
    """

    wire_name: ClassVar[str] = "reshard"
    shards: int
    writes_snapshot: bool

    def perform(self, coordinator: CoordinatorMachine, now: float) -> bool:
        return coordinator.resharding.start(self.shards, self.writes_snapshot)

    def as_json(self) -> Mapping[str, Any]:
        return {"shards": self.shards, "keeps": self.writes_snapshot}

    @staticmethod
    def from_json(shards: int, keeps: bool) -> "StartReshard":
        return StartReshard(shards, keeps)


@dataclass(frozen=True, slots=True)
class RecordLoadedShard(Command[None]):
    """Note that a shard has its new part in a reshard."""

    wire_name: ClassVar[str] = "moved"
    shard: int

    def perform(self, coordinator: CoordinatorMachine, now: float) -> None:
        coordinator.resharding.record_loaded(self.shard)


@dataclass(frozen=True, slots=True)
class FinishReshard(Command[None]):
    """End a reshard of which all shards have their new part."""

    wire_name: ClassVar[str] = "settle"

    def perform(self, coordinator: CoordinatorMachine, now: float) -> None:
        coordinator.resharding.finish(now)
