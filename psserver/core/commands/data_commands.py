"""Commands about batches, reported values and collective calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pscommon.core.data_stream import spec_from_dict
from pscommon.core.log_entries import BatchKey
from pscommon.core.script_place import ScriptPlace, place_from_json
from psserver.core.commands.command import Command
from psserver.core.commands.request_checks import (
    check_batch_request,
    check_collective,
    check_returned_batches,
    check_value_names,
)
from psserver.core.coordinator.collective_calls import CollectiveRequest
from psserver.core.coordinator.data_requests import BatchesReply, BatchRequest
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.workers.collectives import CollectiveValues
from psserver.core.workers.reported_values import ReportedValue


@dataclass(frozen=True, slots=True)
class LeaseBatches(BatchRequest, Command[BatchesReply | None]):
    """Lease batches to a worker; the reply None means that there are none yet."""

    wire_name: ClassVar[str] = "next_batches"

    def perform(self, coordinator: CoordinatorMachine, now: float) -> BatchesReply | None:
        return coordinator.data.lease(self, now)

    def as_json(self) -> Mapping[str, Any]:
        return {
            "worker": self.worker,
            "spec": self.spec.as_dict(),
            "received": self.received,
            "count": self.count,
            "idle": self.idle,
            "first_open": self.first_open,
            **_place_to_json(self.place),
        }

    @staticmethod
    def from_json(
        spec: dict[str, Any], place: list[Any] | None = None, **others: Any
    ) -> "LeaseBatches":
        return LeaseBatches(spec=spec_from_dict(spec), place=_place_from_json(place), **others)

    def check(self, coordinator: CoordinatorMachine) -> None:
        check_batch_request(coordinator, self)

    def repetition_state(self, coordinator: CoordinatorMachine) -> tuple[object, ...] | None:
        return coordinator.data.repetition_state(self)


@dataclass(frozen=True, slots=True)
class ReturnBatches(Command[None]):
    """Take batches back that a worker will not push.

    Attributes:
        used: The worker has evaluated them: they are committed. Otherwise they become free.
    """

    wire_name: ClassVar[str] = "return_batches"
    worker: int
    batches: Sequence[BatchKey]
    used: bool = False

    def perform(self, coordinator: CoordinatorMachine, now: float) -> None:
        if self.used:
            coordinator.data.commit_evaluated(self.worker, self.batches, now)
        else:
            coordinator.data.give_back(self.worker, self.batches, now)

    def as_json(self) -> Mapping[str, Any]:
        used = {"used": True} if self.used else {}
        return {"worker": self.worker, "batches": list(self.batches), **used}

    @staticmethod
    def from_json(worker: int, batches: list[Any], used: bool = False) -> "ReturnBatches":
        return ReturnBatches(worker, [BatchKey(*key) for key in batches], used)

    def check(self, coordinator: CoordinatorMachine) -> None:
        check_returned_batches(coordinator, self.batches)


@dataclass(frozen=True, slots=True)
class ReportValues(Command[None]):
    """Store values that a worker's script reports."""

    wire_name: ClassVar[str] = "report_values"
    worker: int
    values: Sequence[ReportedValue]

    def perform(self, coordinator: CoordinatorMachine, now: float) -> None:
        member = coordinator.job.member(self.worker, now)
        coordinator.reported.take(member, self.values, coordinator.membership)

    @staticmethod
    def from_json(worker: int, values: list[Any]) -> "ReportValues":
        return ReportValues(worker, [ReportedValue(*value) for value in values])

    def check(self, coordinator: CoordinatorMachine) -> None:
        check_value_names(coordinator, [value.name for value in self.values])


@dataclass(frozen=True, slots=True)
class ReportMetrics(Command[None]):
    """Store values without a history. Only logs of earlier releases have this command."""

    wire_name: ClassVar[str] = "report_metrics"
    worker: int
    metrics: Mapping[str, float]

    def perform(self, coordinator: CoordinatorMachine, now: float) -> None:
        member = coordinator.job.member(self.worker, now)
        for name, value in self.metrics.items():
            coordinator.reported.take_latest(member, name, value)

    def check(self, coordinator: CoordinatorMachine) -> None:
        check_value_names(coordinator, list(self.metrics))


@dataclass(frozen=True, slots=True)
class CallCollective(CollectiveRequest, Command[CollectiveValues | None]):
    """Contribute to a collective call; the reply None means that other workers are missing."""

    wire_name: ClassVar[str] = "collective"

    def perform(self, coordinator: CoordinatorMachine, now: float) -> CollectiveValues | None:
        return coordinator.collectives.call(self, now)

    def as_json(self) -> Mapping[str, Any]:
        return {
            "worker": self.worker,
            "number": self.number,
            "contribution": self.contribution.as_json(),
            "first_open": self.first_open,
            **_place_to_json(self.place),
        }

    @staticmethod
    def from_json(
        contribution: list[Any], place: list[Any] | None = None, **others: Any
    ) -> "CallCollective":
        values = CollectiveValues.from_json(contribution)
        return CallCollective(contribution=values, place=_place_from_json(place), **others)

    def check(self, coordinator: CoordinatorMachine) -> None:
        check_collective(self)

    def repetition_state(self, coordinator: CoordinatorMachine) -> tuple[object, ...] | None:
        return coordinator.collectives.repetition_state(self.worker, self.key)


def _place_to_json(place: ScriptPlace | None) -> Mapping[str, Any]:
    return {"place": place.as_json()} if place is not None else {}


def _place_from_json(place: list[Any] | None) -> ScriptPlace | None:
    return place_from_json(place) if place is not None else None
