"""Log lines about what the job waits for and about refused pushes; the end of a wait for the first
workers.
"""

import math
import time
from collections.abc import Callable, Iterable

from pscommon.core.errors import QUARANTINED, TooFewWorkersError
from pscommon.core.log_entries import Entry, Evict, Reject
from pscommon.core.model_spec import ModelSpec
from pscommon.telemetry.logs import get_logger
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.data.resume_rules import hyper_parameter_changes

NOTICE_INTERVAL_SECONDS = 8.0
"""Time after which a wait is logged, and then logged again."""

REFUSAL_INTERVAL_SECONDS = 1.0
"""Shortest time between two log lines about refused pushes."""

log = get_logger(__name__)


class WaitNotice:
    """Logs what a step waits for, at every interval while it waits."""

    def __init__(self, now: float) -> None:
        self._step = (0, 0)
        self._since = self._logged_at = now

    def update(self, coordinator: CoordinatorMachine, missing: str, now: float) -> None:
        """Log a long wait. missing: What the job waits for, in words; empty: for nothing."""
        step = (coordinator.job.log_id, coordinator.job.version + 1)
        if not missing or step != self._step:
            self._step, self._since, self._logged_at = step, now, now
        elif now - self._logged_at >= NOTICE_INTERVAL_SECONDS:
            self._logged_at = now
            log.info(
                "update_delayed",
                step=step[1],
                waiting_for=missing,
                seconds=round(now - self._since),
            )


class RefusalNotice:
    """Logs refused pushes and quarantined workers. Stale pushes are normal under a policy and not
    logged.

    Its field `suppressed` counts the refused pushes since the last line.
    """

    def __init__(self) -> None:
        self._logged_at, self._skipped = -math.inf, 0

    def update(self, entries: Iterable[Entry], now: float) -> None:
        """Log what is new in the job's log."""
        for entry in entries:
            match entry:
                case Reject() if entry.reason != "STALE":
                    self._refused(entry, now)
                case Evict() if entry.reason.startswith(QUARANTINED):
                    log.warning("worker_quarantined", worker=entry.worker, reason=entry.reason)

    def _refused(self, entry: Reject, now: float) -> None:
        if now - self._logged_at < REFUSAL_INTERVAL_SECONDS:
            self._skipped += 1
            return
        log.warning(
            "push_refused",
            worker=entry.key.worker,
            push=entry.key.seq,
            reason=entry.reason,
            detail=entry.detail,
            suppressed=self._skipped,
        )
        self._logged_at, self._skipped = now, 0


def log_changed_hyper_parameters(before: ModelSpec | None, after: ModelSpec | None) -> None:
    """Log that the first worker of a resumed job has other hyper-parameters."""
    if before is None or after is None:
        return
    for name, settings in after.optimizers.items():
        if changes := hyper_parameter_changes(before.optimizers[name], settings):
            label = f"{name} ({settings.name})" if name else settings.name
            log.info("hyper_parameters_changed", optimizer=label, changes=changes)


class FirstWorkers:
    """Measures the wait for --min-workers: it starts with the first registered worker.

    Args:
        seconds: --join-timeout.
        missing: Returns what the job waits for, in words.
    """

    def __init__(self, seconds: float, missing: Callable[[], str]) -> None:
        self._seconds, self._missing = seconds, missing
        self._since: float | None = None

    def update(self, coordinator: CoordinatorMachine) -> None:
        is_waiting = (
            coordinator.job.begun
            and not coordinator.job.started
            and coordinator.membership.registered()
        )
        self._since = (self._since or time.monotonic()) if is_waiting else None

    def check(self) -> None:
        """Raise TooFewWorkersError if the other workers did not join within --join-timeout."""
        if self._since is not None and (waited := time.monotonic() - self._since) > self._seconds:
            raise TooFewWorkersError(f"after {waited:.0f} s: {self._missing()}")
