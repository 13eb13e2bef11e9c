"""Values that scripts report, as rows of the job's history."""

from typing import NamedTuple

MIN_INTERVAL_SECONDS = 1.0
"""Minimum time between two values of one name that a worker sends."""


class MetricRow(NamedTuple):
    """One reported value.

    time: when it was reported, in seconds since 1970 by the clock of shard 0.
    version: version of the weights that the worker had then.
    worker: number of the worker.
    rank: rank of the worker.
    name: name of the value.
    value: may be NaN or infinite.
    """

    time: float
    version: int
    worker: int
    rank: int
    name: str
    value: float
