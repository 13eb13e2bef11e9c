"""History of reported values: the CSV file of --history, and a digest for the summary."""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pscommon.core.metric_row import MetricRow
from pscommon.system.small_files import replace_file

COLUMNS = ("time", "seconds", "version", "worker", "rank", "name", "value")


def write_csv(path: Path, rows: Sequence[MetricRow]) -> None:
    """Write one line per value, ordered by time; the file is replaced atomically.

    Columns:
        time: UTC, ISO 8601.
        seconds: time since the first line.
        version: version of the worker's weights.
        worker, rank: the reporting worker.
        name: name of the value.
        value: Python notation of a float; includes nan, inf and -inf.

    Raises:
        OSError: the file cannot be written.
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
    replace_file(path, text.getvalue())


def digest(rows: Iterable[MetricRow]) -> dict[str, dict[str, Any]]:
    """Return a digest of each name: rows, first, last, least and greatest value.

    A digest covers the lowest rank that reported the name. `least` and `greatest` ignore values
    that are not finite; they are None without a finite value.
    """
    series: dict[str, list[MetricRow]] = {}
    for row in rows:
        rows_of_name = series.setdefault(row.name, [])
        if rows_of_name and row.rank < rows_of_name[0].rank:
            rows_of_name.clear()
        if not rows_of_name or row.rank == rows_of_name[0].rank:
            rows_of_name.append(row)
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
