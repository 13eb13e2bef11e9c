"""What scripts have reported over time, in a bounded number of rows.

Theory of operation. Rows come in series: one for each rank and name. A series keeps its first
and its newest row, and between them rows that are at least `interval` seconds apart: a newer row
replaces the newest one until that is `interval` after its predecessor. When there are more than
MAX_ROWS, `interval` doubles and every series is thinned by the same rule, until at most two
thirds of MAX_ROWS are left. So all parts of a long job have the same density. If the first and
newest rows alone are too many, the series that were reported longest ago are dropped.

Rows are decided by commands, with their times as arguments: a coordinator that is made again
from its log, and a standby, have the same history.
"""

import json
from collections.abc import Mapping
from typing import Any

from pscommon.core.limits import MAX_METRICS, MAX_NAME_CHARACTERS
from pscommon.core.metric_row import MIN_INTERVAL_SECONDS, MetricRow
from psserver.core.reports.finite import json_number

MAX_ROWS = 10_000
MAX_THINNED_ROWS = MAX_ROWS * 2 // 3
MAX_INTERVAL_SECONDS = 2.0**40

Series = list[MetricRow]


class ReportHistory:
    """See the module's text."""

    def __init__(self) -> None:
        self._interval = MIN_INTERVAL_SECONDS
        self._series: dict[tuple[int, str], Series] = {}
        self._names: set[str] = set()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def takes(self, name: str) -> bool:
        """Return whether values of this name are kept: short enough, and not one name too many."""
        return 0 < len(name) <= MAX_NAME_CHARACTERS and (
            name in self._names or len(self._names) < MAX_METRICS
        )

    def add(self, row: MetricRow) -> None:
        """Keep a row whose name `takes` accepts. A row that repeats the newest one of its series
        adds nothing.
        """
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

    def rows(self) -> list[MetricRow]:
        """Return all rows, by time."""
        return sorted(
            (row for series in self._series.values() for row in series), key=lambda row: row[:5]
        )

    def state(self) -> dict[str, Any]:
        """Return all of it, JSON-ready; `recover` is the way back."""
        series = [[rank, name, _packed(rows)] for (rank, name), rows in self._series.items()]
        return {"interval": self._interval, "series": series}

    def recover(self, state: Mapping[str, Any]) -> None:
        """Be exactly the history whose state this is."""
        self._interval = state["interval"]
        self._series = {
            (rank, name): _unpacked(rank, name, rows) for rank, name, rows in state["series"]
        }
        self._names = {name for _, name in self._series}
        self._count = sum(map(len, self._series.values()))

    def _apart(self, earlier: MetricRow, later: MetricRow) -> bool:
        # absolute: a clock that was set back must not stop the history
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
        kept = series[:1]
        for row in series[1:-1]:
            if self._apart(kept[-1], row):
                kept.append(row)
        return kept + series[1:][-1:]

    def _drop_oldest_series(self) -> None:
        for key in sorted(self._series, key=lambda key: (self._series[key][-1].time, key)):
            if self._count <= MAX_THINNED_ROWS:
                break
            self._count -= len(self._series.pop(key))
        self._names = {name for _, name in self._series}


def _packed(rows: Series) -> str:
    """Rows as text: manifests are indented, and one number a line takes 70 ms to read for 10 000
    rows.
    """
    return json.dumps([(row.time, row.version, row.worker, json_number(row.value)) for row in rows])


def _unpacked(rank: int, name: str, text: str) -> Series:
    return [
        MetricRow(time, version, worker, rank, name, float(value))
        for time, version, worker, value in json.loads(text)
    ]
