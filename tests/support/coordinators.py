"""A coordinator for tests of a shard alone."""

from collections.abc import Callable

from pscommon.core.log_entries import Cut
from psserver.core.job.snapshot_schedule import PartReport
from psserver.parameters.store import ParameterStore


class SilentCoordinator:
    """Takes reports and does nothing with them."""

    def request_report(self) -> None:
        pass

    def record_part(self, part: PartReport) -> None:
        pass

    def describe_wait(self) -> str:
        return ""


def no_snapshot(cut: Cut, store: ParameterStore, record_part: Callable[[PartReport], None]) -> None:
    """Write nothing."""
