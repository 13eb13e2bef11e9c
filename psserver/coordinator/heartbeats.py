"""What workers send with their heartbeats, and what they are told in return."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pscommon.core.errors import FencedError, InvalidRequestError
from pscommon.core.metric_row import MetricRow
from psserver.coordinator.executor import CommandExecutor
from psserver.core.commands.recorder import Recorder
from psserver.core.reports.reported_values import ReportedValue

MAX_AGE_SECONDS = 60.0
"""An older value counts as reported this long ago: workers keep only the newest value of each
name.
"""

log = logging.getLogger("psserver")


class ReceivedValue(NamedTuple):
    """A reported value as it comes over the wire; age in seconds."""

    name: str
    value: float
    version: int
    age: float


class HeartbeatAnswer(NamedTuple):
    """The answer to a heartbeat.

    is_over: the job ends.
    is_draining: the worker was asked to leave.
    workers: number of registered workers.
    is_first: the worker is the first of those; while the job waits for its workers: its rank is 0.
    """

    is_over: bool
    is_draining: bool
    workers: int
    is_first: bool


class Heartbeats:
    """All methods may be called from any thread. is_over: whether the job ends; raises why it
    has failed.
    """

    def __init__(self, executor: CommandExecutor, is_over: Callable[[], bool]) -> None:
        self._executor = executor
        self._is_over = is_over

    def beat(self, worker: int, **values: float | str) -> HeartbeatAnswer:
        """Take a sign of life (see Member.take). Raises FencedError, and the error with which
        the job has failed.
        """

        def action(recorder: Recorder, now: float) -> bool:
            member = recorder.coordinator.member(worker, now)
            member.take(**values)
            return member.draining

        draining = self._executor.step(action, quiet=True)
        return HeartbeatAnswer(self._is_over(), draining, *self.standing(worker))

    def standing(self, worker: int) -> tuple[int, bool]:
        """Return how many workers are registered, and whether this one is the first."""

        def action(recorder: Recorder, now: float) -> tuple[int, bool]:
            return recorder.coordinator.roster.standing(worker, recorder.coordinator.started)

        return self._executor.step(action, quiet=True)

    def report(self, worker: int, values: Sequence[ReceivedValue]) -> None:
        """Take reported values. Raises InvalidRequestError for a name that is too long, or one
        too many.
        """
        now = time.time()
        newest = {sent.name: sent for sent in values}
        taken = [
            ReportedValue(
                sent.name, sent.value, sent.version, now - min(max(0.0, sent.age), MAX_AGE_SECONDS)
            )
            for sent in newest.values()
        ]
        if taken:
            self._executor.do("report_values", quiet=True, worker=worker, values=taken)

    def report_beside(self, worker: int, values: Sequence[ReceivedValue]) -> None:
        """Take the values that come with another request, which must not fail because of them."""
        if not values:
            return
        try:
            self.report(worker, values)
        except (FencedError, InvalidRequestError) as error:
            log.warning(
                "reported values are not kept", extra={"worker": worker, "problem": str(error)}
            )

    def history(self) -> list[MetricRow]:
        """Return all rows of reported values, by time."""
        return self._executor.step(
            lambda recorder, now: recorder.coordinator.reported.history.rows(), quiet=True
        )
