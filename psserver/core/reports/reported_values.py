"""The values that scripts report: the last one of each name, and the history of all."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pscommon.core.metric_row import MetricRow
from psserver.core.reports.finite import json_number
from psserver.core.reports.report_history import ReportHistory
from psserver.core.workers.members import Member, WorkerState
from psserver.core.workers.membership import Membership


class ReportedValue(NamedTuple):
    """One value as a worker reports it; the fields are those of MetricRow."""

    name: str
    value: float
    version: int
    time: float


class ReportedValues:
    """Where several workers report a name, the value of the lowest rank is the last one: all
    runs show the same.

    latest: rank and value by name.
    history: rows of all workers.
    """

    def __init__(self) -> None:
        self.latest: dict[str, tuple[int, float]] = {}
        self.history = ReportHistory()

    def take(self, member: Member, values: Sequence[ReportedValue], membership: Membership) -> None:
        """Take values of a worker. A name that is too long, or one too many, is left out."""
        for name, value, version, time in values:
            if self.history.takes(name):
                self.history.add(MetricRow(time, version, member.worker, member.rank, name, value))
                self.take_latest(member, name, value, membership)

    def take_latest(
        self, member: Member, name: str, value: float, membership: Membership | None = None
    ) -> None:
        """Take the last value of a worker. With a membership, a lost worker gives way to one of a
        higher rank.
        """
        rank, _ = self.latest.get(name, (member.rank, value))
        if member.rank <= rank or (membership is not None and _is_lost(membership, rank)):
            self.latest[name] = (member.rank, value)

    def state(self) -> dict[str, Any]:
        """Return all of it, JSON-ready, for the coordinator's state. Without a history there is
        no such key.
        """
        latest = {name: [rank, json_number(value)] for name, (rank, value) in self.latest.items()}
        return {
            "metrics": latest,
            **({"history": self.history.state()} if len(self.history) else {}),
        }

    def recover(self, state: Mapping[str, Any]) -> None:
        """Be what the coordinator's state says."""
        self.latest = {
            name: (rank, float(value)) for name, (rank, value) in state["metrics"].items()
        }
        self.history = ReportHistory()
        if "history" in state:
            self.history.recover(state["history"])


def _is_lost(membership: Membership, rank: int) -> bool:
    states = [member.state for member in membership.members.values() if member.rank == rank]
    return bool(states) and all(state in (WorkerState.LOST, WorkerState.PAST) for state in states)
