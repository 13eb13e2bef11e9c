"""The values that scripts report: the latest one of each name, and a bounded history of all.

Theory of operation. There is one series of rows for each rank and name. A series keeps its first
and its newest row, and between them rows that are at least `interval` seconds apart. A newer row
replaces the newest one until that one is `interval` after its predecessor.

Above MAX_ROWS rows, `interval` doubles and every series is thinned by the same rule, until at most
two thirds of MAX_ROWS are left. So all parts of a long job have the same density. If only first
and newest rows are left and they are too many, the series with the oldest newest row are dropped.

Invariant: rows and their times come from commands only. So a standby, and a coordinator that
replays its log, have the same history.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pscommon.core.limits import MAX_METRICS, MAX_NAME_CHARACTERS
from pscommon.core.metric_row import MIN_INTERVAL_SECONDS, MetricRow
from psserver.core.workers.members import Member, WorkerState
from psserver.core.workers.membership import Membership

MAX_ROWS = 10_000
MAX_THINNED_ROWS = MAX_ROWS * 2 // 3
MAX_INTERVAL_SECONDS = 2.0**40

Series = list[MetricRow]


def json_number(value: float) -> float | str:
    """Return the value, or "nan", "inf" or "-inf"; float() is the inverse.

    Standard JSON has no such numbers, and NaN is not equal to itself after a round trip.
    """
    return value if math.isfinite(value) else str(value)


class ReportHistory:
    """Rows of reported values in series (see the module docstring)."""

    def __init__(self) -> None:
        self._interval = MIN_INTERVAL_SECONDS
        self._series: dict[tuple[int, str], Series] = {}
        self._names: set[str] = set()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def takes(self, name: str) -> bool:
        """Return whether values of this name are kept; length and count of names have limits."""
        return 0 < len(name) <= MAX_NAME_CHARACTERS and (
            name in self._names or len(self._names) < MAX_METRICS
        )

    def add(self, row: MetricRow) -> None:
        """Add a row whose name `takes` accepts; ignore a repetition of its series' newest row."""
        self._names.add(row.name)
        series = self._series.setdefault((row.rank, row.name), [])
        if series and (row.worker, row.version, row.value) == (
            series[-1].worker,
            series[-1].version,
            series[-1].value,
        ):
            return
        if len(series) >= 2 and not self._apart(series[-2], series[-1]):
            series[-1] = row
            return
        series.append(row)
        self._count += 1
        if self._count > MAX_ROWS:
            self._thin()

    def newest(self, rank: int, name: str) -> MetricRow | None:
        """Return the newest row of a series; None: the history has none."""
        series = self._series.get((rank, name))
        return series[-1] if series else None

    def rows(self) -> list[MetricRow]:
        """Return all rows, sorted by time."""
        return sorted(
            (row for series in self._series.values() for row in series), key=lambda row: row[:5]
        )

    def state(self) -> dict[str, Any]:
        """Return the state, JSON-ready; `recover` is the inverse."""
        series = [[rank, name, _packed(rows)] for (rank, name), rows in self._series.items()]
        return {"interval": self._interval, "series": series}

    def recover(self, state: Mapping[str, Any]) -> None:
        """Restore the exact history."""
        self._interval = state["interval"]
        self._series = {
            (rank, name): _unpacked(rank, name, rows) for rank, name, rows in state["series"]
        }
        self._names = {name for _, name in self._series}
        self._count = sum(map(len, self._series.values()))

    def _apart(self, earlier: MetricRow, later: MetricRow) -> bool:
        # absolute difference: a clock that was set back must not stop the history
        return abs(later.time - earlier.time) >= self._interval

    def _thin(self) -> None:
        while (
            self._count > MAX_THINNED_ROWS
            and self._interval < MAX_INTERVAL_SECONDS
            and self._has_middle_rows()
        ):
            self._interval *= 2
            self._series = {key: self._thinned(series) for key, series in self._series.items()}
            self._count = sum(map(len, self._series.values()))
        if self._count > MAX_ROWS:
            self._drop_oldest_series()

    def _has_middle_rows(self) -> bool:
        return any(len(series) > 2 for series in self._series.values())

    def _thinned(self, series: Series) -> Series:
        thinned = series[:1]
        for row in series[1:-1]:
            if self._apart(thinned[-1], row):
                thinned.append(row)
        return thinned + series[1:][-1:]

    def _drop_oldest_series(self) -> None:
        for key in sorted(self._series, key=lambda key: (self._series[key][-1].time, key)):
            if self._count <= MAX_THINNED_ROWS:
                break
            self._count -= len(self._series.pop(key))
        self._names = {name for _, name in self._series}


def _packed(rows: Series) -> str:
    """Return rows as one text.

    Manifests are indented: 10 000 rows with one number a line take 70 ms to parse.
    """
    return json.dumps([(row.time, row.version, row.worker, json_number(row.value)) for row in rows])


def _unpacked(rank: int, name: str, text: str) -> Series:
    return [
        MetricRow(time, version, worker, rank, name, float(value))
        for time, version, worker, value in json.loads(text)
    ]


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

    def latest_rows(self) -> list[MetricRow]:
        """Return the row of the latest value of each name that the history has."""
        rows = (self.history.newest(rank, name) for name, (rank, _) in self.latest.items())
        return [row for row in rows if row is not None]

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
