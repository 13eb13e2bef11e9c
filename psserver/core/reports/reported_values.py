"""The values that scripts report: the latest one of each name, and the history of all."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pscommon.core.metric_row import MetricRow
from psserver.core.reports.finite import json_number
from psserver.core.reports.report_history import ReportHistory
from psserver.core.workers.members import Member, WorkerState
from psserver.core.workers.membership import Membership


class ReportedValue(NamedTuple):
    """One value as a worker reports it.

    name: name of the value.
    value: may be NaN or infinite.
    version: version of the weights that the worker had.
    time: when it was reported, in seconds since 1970 by the clock of shard 0.
    """

    name: str
    value: float
    version: int
    time: float


class ReportedValues:
    """Reported values of all workers.

    If several workers report a name, the latest value is that of the lowest rank, so that all runs
    show the same one.

    latest: rank and value, by name.
    history: rows of all workers.
    """

    def __init__(self) -> None:
        self.latest: dict[str, tuple[int, float]] = {}
        self.history = ReportHistory()

    def take(self, member: Member, values: Sequence[ReportedValue], membership: Membership) -> None:
        """Record values of a worker; ignore a name that is too long or one too many."""
        for name, value, version, time in values:
            if self.history.takes(name):
                self.history.add(MetricRow(time, version, member.worker, member.rank, name, value))
                self.take_latest(member, name, value, membership)

    def take_latest(
        self, member: Member, name: str, value: float, membership: Membership | None = None
    ) -> None:
        """Update the latest value of a name.

        With a membership, a worker of higher rank may replace the value of a lost worker.
        """
        rank, _ = self.latest.get(name, (member.rank, value))
        if member.rank <= rank or (membership is not None and _is_lost(membership, rank)):
            self.latest[name] = (member.rank, value)

    def state(self) -> dict[str, Any]:
        """Return the state, JSON-ready; an empty history is omitted. `recover` is the inverse."""
        latest = {name: [rank, json_number(value)] for name, (rank, value) in self.latest.items()}
        return {
            "metrics": latest,
            **({"history": self.history.state()} if len(self.history) else {}),
        }

    def recover(self, state: Mapping[str, Any]) -> None:
        """Restore the exact values from the coordinator's state."""
        self.latest = {
            name: (rank, float(value)) for name, (rank, value) in state["metrics"].items()
        }
        self.history = ReportHistory()
        if "history" in state:
            self.history.recover(state["history"])


def _is_lost(membership: Membership, rank: int) -> bool:
    states = [member.state for member in membership.members.values() if member.rank == rank]
    return bool(states) and all(state in (WorkerState.LOST, WorkerState.PAST) for state in states)
