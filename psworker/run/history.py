"""The history of reported values as ps-run shows it: the CSV file of --history, and a digest for
the summary.
"""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pscommon.core.metric_row import MetricRow
from pscommon.system.small_files import write_whole

COLUMNS = ("time", "seconds", "version", "worker", "rank", "name", "value")


def write_csv(path: Path, rows: Sequence[MetricRow]) -> None:
    """Write a line for each value, by time; the whole file or nothing. Raises OSError.

    time: UTC, ISO 8601. seconds: since the first line. version: updates in the weights that the
    worker had. value: as Python writes it, so also nan, inf and -inf.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        moment = (
            datetime.fromtimestamp(row.time, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z")
        )
        since = f"{row.time - rows[0].time:.3f}"
        writer.writerow(
            (moment, since, row.version, row.worker, row.rank, row.name, repr(row.value))
        )
    write_whole(path, text.getvalue())


def digest(rows: Iterable[MetricRow]) -> dict[str, dict[str, Any]]:
    """Return for each name, of the lowest rank that has reported it: number of rows, first,
    last, least, greatest.

    least, greatest: of the finite values; null where there is none.
    """
    series: dict[str, list[MetricRow]] = {}
    for row in rows:
        known = series.setdefault(row.name, [])
        if known and row.rank < known[0].rank:
            known.clear()
        if not known or row.rank == known[0].rank:
            known.append(row)
    return {name: _digest([row.value for row in series[name]]) for name in sorted(series)}


def _digest(values: Sequence[float]) -> dict[str, Any]:
    finite = [value for value in values if math.isfinite(value)]
    least, greatest = (min(finite), max(finite)) if finite else (None, None)
    return {
        "rows": len(values),
        "first": values[0],
        "last": values[-1],
        "least": least,
        "greatest": greatest,
    }
