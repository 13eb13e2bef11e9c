"""What the coordinator tells people about its workers: lines in the log, and numbers for
Prometheus.
"""

import logging
import math
import time
from collections.abc import Iterable, Mapping

from psserver.core.commands.waiting import late
from psserver.core.job.coordinator import CoordinatorMachine
from psserver.core.workers.health import WorkerCondition, WorkerHealth, conditions
from psserver.core.workers.members import Member
from psserver.monitoring.wait_notices import WaitNotice
from psserver.process.metrics import ServerMetrics

SURE = 1.0
"""Seconds that a worker has been slow, or not, before that is worth a line."""

LATE = (WorkerHealth.SLOW, WorkerHealth.HANGING)

QUIET = 10.0
"""Seconds at least between two lines about one worker's pace."""

log = logging.getLogger("psserver")


def health(coordinator: CoordinatorMachine, now: float) -> dict[int, WorkerCondition]:
    """How everybody who is here fares. Called with the coordinator at rest."""
    return conditions(coordinator.membership, {member.worker for member in late(coordinator)}, now)


class WorkerMonitor:
    """Looks at the workers at every tick. seconds: for which a lost one's place is kept
    (--on-worker-loss).
    """

    def __init__(self, metrics: ServerMetrics, seconds: float) -> None:
        self._metrics, self._kept_for = metrics, seconds
        self._slow: set[int] = set()  # those of whom people know that they are
        self._since: dict[int, float] = {}  # that what people know is wrong
        self._told: dict[int, float] = {}
        self._steps: dict[int, int] = {}  # that they had when this last looked
        self._notice = WaitNotice(time.monotonic())

    def lost(self, members: Iterable[Member]) -> None:
        """Their leases have ended."""
        for member in members:
            if member.is_current:
                extra = {"worker": member.worker, "seconds": self._kept_for}
                log.warning("worker is silent; its place is kept", extra=extra)
            else:
                log.warning("worker lost", extra={"worker": member.worker, "reason": member.reason})
                self._metrics.gone(member.worker)

    def look(
        self,
        coordinator: CoordinatorMachine,
        found: Mapping[int, WorkerCondition],
        whom: str,
        now: float,
    ) -> None:
        """At everybody who is here: a line for each who has become slow, and one when it is so
        no longer.

        whom: all wait for these, in words; empty: nobody does.
        """
        self._notice.look(coordinator, whom, now)
        membership = coordinator.membership
        self._metrics.workers(membership.counts())
        self._metrics.backup_workers(coordinator.policy.backup)
        for gone in (self._steps.keys() | self._since.keys() | self._told.keys()) - found.keys():
            self._forget(gone)
        for worker, condition in found.items():
            member = membership.members[worker]
            if member.is_registered:
                self._metrics.worker(
                    worker, member.clock, pushed=member.steps > self._steps.get(worker, 0)
                )
                self._steps[worker] = member.steps
            if condition.health is not WorkerHealth.SILENT and self._is_news(
                worker, condition, now
            ):
                self._tell(member, condition, now)

    def _is_news(self, worker: int, condition: WorkerCondition, now: float) -> bool:
        if (condition.health in LATE) == (worker in self._slow):
            self._since.pop(worker, None)
            return False
        since = self._since.setdefault(worker, now)
        return now - since >= SURE and now - self._told.get(worker, -math.inf) >= QUIET

    def _tell(self, member: Member, condition: WorkerCondition, now: float) -> None:
        self._slow ^= {member.worker}
        self._told[member.worker] = now
        hangs = condition.health is WorkerHealth.HANGING
        line = (
            "worker makes no call"
            if hangs
            else "worker is slow"
            if member.worker in self._slow
            else "worker is slow no longer"
        )
        seconds = {
            "step_seconds": _rounded(condition.seconds),
            "median_seconds": _rounded(condition.median),
        }
        seconds |= {"no_call_seconds": _rounded(member.no_call_seconds)} if hangs else {}
        log.warning(
            line,
            extra={"worker": member.worker, "rank": member.rank, "host": member.host, **seconds},
        )

    def _forget(self, worker: int) -> None:
        self._metrics.gone(worker)
        self._steps.pop(worker, None)
        self._slow.discard(worker)
        self._since.pop(worker, None)
        self._told.pop(worker, None)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds:.3g}")
