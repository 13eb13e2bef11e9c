"""Heartbeats of workers, the values that they report, and the answers."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pscommon.core.errors import FencedError, InvalidRequestError
from pscommon.core.metric_row import MetricRow
from pscommon.telemetry.logs import get_logger
from psserver.coordinator.executor import CommandExecutor
from psserver.core.commands.data_commands import ReportValues
from psserver.core.workers.members import WorkerHeartbeat
from psserver.core.workers.reported_values import ReportedValue

MAX_AGE_SECONDS = 60.0
"""An older value counts as reported this long ago: workers keep only the newest value of each
name.
"""

log = get_logger(__name__)


def received_value(name: str, value: float, version: int, age: float) -> ReportedValue:
    """Return a value that a worker reports `age` seconds after it had it."""
    return ReportedValue(name, value, version, time.time() - min(max(0.0, age), MAX_AGE_SECONDS))


class HeartbeatAnswer(NamedTuple):
    """The answer to a heartbeat.

    Attributes:
        is_over: The job ends.
        is_draining: The worker was asked to leave.
        workers: Number of registered workers; before training starts: of current workers, at least
            --min-workers.
        is_first: The worker is the first registered worker; before training starts: its rank is
            0.
    """

    is_over: bool
    is_draining: bool
    workers: int
    is_first: bool


class Heartbeats:
    """Accepts heartbeats and reported values. All methods may be called from any thread.

    check_is_over: Returns whether the job ends; raises the error with which it failed.
    """

    def __init__(self, executor: CommandExecutor, check_is_over: Callable[[], bool]) -> None:
        self._executor, self._check_is_over = executor, check_is_over

    def beat(self, worker: int, heartbeat: WorkerHeartbeat) -> HeartbeatAnswer:
        """Record what a worker reports of itself.

        Raises FencedError if the worker is no longer a member, and the error with which the job
        failed.
        """
        with self._executor.step(quiet=True) as (recorder, now):
            member = recorder.coordinator.job.member(worker, now)
            member.heartbeat = heartbeat
            draining = member.draining
        return HeartbeatAnswer(self._check_is_over(), draining, *self.standing(worker))

    def standing(self, worker: int) -> tuple[int, bool]:
        """Return how many workers train or will begin to, and whether this one is the first."""
        with self._executor.step(quiet=True) as (recorder, _):
            job = recorder.coordinator.job
            awaited = 0 if job.started else job.min_workers
            return job.membership.count_and_is_first(worker, awaited)

    def report(self, worker: int, values: Sequence[ReportedValue]) -> None:
        """Record reported values.

        Raises InvalidRequestError if a name is too long, or there are too many names.
        """
        newest = list({value.name: value for value in values}.values())
        if newest:
            self._executor.do(ReportValues(worker, newest), quiet=True)

    def report_beside(self, worker: int, values: Sequence[ReportedValue]) -> None:
        """Record the values sent with another request, which must not fail because of them."""
        if not values:
            return
        try:
            self.report(worker, values)
        except (FencedError, InvalidRequestError) as error:
            log.warning("reported_values_dropped", worker=worker, problem=str(error))

    def history(self) -> list[MetricRow]:
        """Return all rows of reported values, by time."""
        with self._executor.step(quiet=True) as (recorder, _):
            return recorder.coordinator.reported.history.rows()
