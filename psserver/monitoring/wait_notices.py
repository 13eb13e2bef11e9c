"""What shard 0 tells people of those whom the job waits for, and of those whose gradients it
refuses.
"""

import logging
import math
from collections.abc import Iterable

from pscommon.core.errors import QUARANTINED
from pscommon.core.log_entries import Entry, Evict, Reject
from pscommon.core.model_spec import ModelSpec
from psserver.core.data.resume_rules import hyper_parameter_changes
from psserver.core.job.coordinator import CoordinatorMachine

NOTICE = 8.0
"""Seconds after which a wait is worth a line, and then another one: nobody waits for 10 without."""

OFTEN = 1.0
"""Seconds at least between two lines about pushes that are refused."""

log = logging.getLogger("psserver")


class WaitNotice:
    """Says whom a step waits for, once that has taken NOTICE seconds, and again and again while
    it does.
    """

    def __init__(self, now: float) -> None:
        self._step = (0, 0)
        self._since = self._said = now

    def look(self, coordinator: CoordinatorMachine, whom: str, now: float) -> None:
        """whom: in words, as of now; empty when nobody waits."""
        step = (coordinator.epoch, coordinator.version + 1)
        if not whom or step != self._step:
            self._step, self._since, self._said = step, now, now
        elif now - self._said >= NOTICE:
            self._said = now
            log.info(
                "waiting",
                extra={"step": step[1], "waiting_for": whom, "seconds": round(now - self._since)},
            )


class RefusalNotice:
    """Says whose push is refused, and why, and who is put into quarantine. Stale pushes are no
    news: a policy's price.

    unsaid: refused pushes since the last line about one.
    """

    def __init__(self) -> None:
        self._said, self._unsaid = -math.inf, 0

    def look(self, entries: Iterable[Entry], now: float) -> None:
        """At what is new in the job's log."""
        for entry in entries:
            match entry:
                case Reject() if entry.reason != "STALE":
                    self._refused(entry, now)
                case Evict() if entry.reason.startswith(QUARANTINED):
                    log.warning(
                        "worker is quarantined",
                        extra={"worker": entry.worker, "reason": entry.reason},
                    )

    def _refused(self, entry: Reject, now: float) -> None:
        if now - self._said < OFTEN:
            self._unsaid += 1
            return
        extra = {
            "worker": entry.key.worker,
            "push": entry.key.seq,
            "reason": entry.reason,
            "detail": entry.detail,
        }
        log.warning("a push is refused", extra={**extra, "unsaid": self._unsaid})
        self._said, self._unsaid = now, 0


def tell_adopted(before: ModelSpec | None, after: ModelSpec | None) -> None:
    """The first worker of a resumed job has brought other hyper-parameters."""
    changes = hyper_parameter_changes(before.optimizer, after.optimizer) if before and after else ""
    if changes and after:
        log.info(
            "hyper-parameters changed",
            extra={"optimizer": after.optimizer.name, "changes": changes},
        )
