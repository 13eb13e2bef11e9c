"""The order in which views show the workers of the status."""

from collections.abc import Mapping, Sequence
from typing import Any


def slowest_first(workers: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return members with problems, then by time of a step, then the newest of those that left.

    A value that an older server does not send counts as unknown.
    """

    def place(row: Mapping[str, Any]) -> tuple[bool, bool, float, int]:
        is_member = row.get("silent_seconds") is not None
        seconds = row.get("own_seconds") or row.get("step_seconds") or 0.0
        return not is_member, row.get("health") == "live", -seconds, -(row.get("worker") or 0)

    return sorted(workers, key=place)
