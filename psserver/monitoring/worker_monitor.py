"""What the coordinator reports about its workers: log lines and metrics."""

import math
import time
from collections.abc import Iterable, Mapping

from pscommon.telemetry.logs import get_logger
from psserver.core.commands.waiting import late
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.workers.health import WorkerCondition, WorkerHealth, conditions
from psserver.core.workers.members import Member
from psserver.monitoring.wait_notices import WaitNotice
from psserver.process.metrics import ServerMetrics

CONFIRM_SECONDS = 3.0
"""A worker must be slow, or fast again, for this long before it is logged: on a busy machine any
worker is slow for a second.
"""

LATE = (WorkerHealth.SLOW, WorkerHealth.HANGING)

LOG_INTERVAL_SECONDS = 10.0
"""Shortest time between two log lines about one worker's speed."""

log = get_logger(__name__)


def find_conditions(coordinator: CoordinatorMachine, now: float) -> dict[int, WorkerCondition]:
    """Return the condition of every member. The caller guarantees that the coordinator does not
    change.
    """
    return conditions(coordinator.membership, {member.worker for member in late(coordinator)}, now)


class WorkerMonitor:
    """Observes the workers at every tick.

    Args:
        seconds: How long the place of a lost worker is kept (--on-worker-loss).
    """

    def __init__(self, metrics: ServerMetrics, seconds: float) -> None:
        self._metrics, self._keep_seconds = metrics, seconds
        self._slow: set[int] = set()  # workers that were logged as slow
        self._since: dict[int, float] = {}  # since when the logged state is wrong
        self._logged_at: dict[int, float] = {}
        self._steps: dict[int, int] = {}  # at the last tick
        self._notice = WaitNotice(time.monotonic())

    def log_lost(self, members: Iterable[Member]) -> None:
        """Log the workers whose leases have ended."""
        for member in members:
            if member.is_current:
                log.warning("worker_silent", worker=member.worker, keep_seconds=self._keep_seconds)
            else:
                log.warning("worker_lost", worker=member.worker, reason=member.reason)
                self._metrics.remove_worker(member.worker)

    def update(
        self,
        coordinator: CoordinatorMachine,
        found: Mapping[int, WorkerCondition],
        missing: str,
        now: float,
    ) -> None:
        """Log every worker that becomes slow or recovers, and update the metrics.

        Args:
            found: Conditions of the members.
            missing: What all wait for, in words; empty if nothing.
        """
        self._notice.update(coordinator, missing, now)
        membership = coordinator.membership
        self._metrics.set_workers(membership.counts())
        self._metrics.set_workers_wanted(coordinator.job.workers_wanted)
        self._metrics.backup_workers.set(coordinator.job.policy.backup)
        for departed in (
            self._steps.keys() | self._since.keys() | self._logged_at.keys()
        ) - found.keys():
            self._forget(departed)
        for worker, condition in found.items():
            member = membership.members[worker]
            if member.is_registered:
                self._metrics.set_worker(
                    worker, member.clock, has_pushed=member.steps > self._steps.get(worker, 0)
                )
                self._steps[worker] = member.steps
            if condition.health is not WorkerHealth.SILENT and self._is_confirmed_change(
                worker, condition, now
            ):
                self._log_change(member, condition, now)

    def _is_confirmed_change(self, worker: int, condition: WorkerCondition, now: float) -> bool:
        if (condition.health in LATE) == (worker in self._slow):
            self._since.pop(worker, None)
            return False
        since = self._since.setdefault(worker, now)
        return (
            now - since >= CONFIRM_SECONDS
            and now - self._logged_at.get(worker, -math.inf) >= LOG_INTERVAL_SECONDS
        )

    def _log_change(self, member: Member, condition: WorkerCondition, now: float) -> None:
        self._slow ^= {member.worker}
        self._logged_at[member.worker] = now
        fields = {
            "worker": member.worker,
            "rank": member.rank,
            "host": member.host,
            "step_seconds": _rounded(condition.seconds),
            "median_seconds": _rounded(condition.median),
        }
        if condition.health is WorkerHealth.HANGING:
            silent = _rounded(member.heartbeat.no_call_seconds)
            log.warning("worker_hanging", **fields, no_call_seconds=silent)
        elif member.worker in self._slow:
            log.warning("worker_slow", **fields)
        else:
            log.info("worker_recovered", **fields)

    def _forget(self, worker: int) -> None:
        self._metrics.remove_worker(worker)
        self._steps.pop(worker, None)
        self._slow.discard(worker)
        self._since.pop(worker, None)
        self._logged_at.pop(worker, None)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds:.3g}")
