"""What shard 0 tells people of those whom the job waits for."""

import logging

from psserver.core.coordinator import Coordinator

NOTICE = 8.0
"""Seconds after which a wait is worth a line, and then another one: nobody waits for 10 without."""

log = logging.getLogger("psserver")


class WaitNotice:
    """Says whom a step waits for, once that has taken NOTICE seconds, and again and again while it does."""

    def __init__(self, now: float) -> None:
        self._step = (0, 0)
        self._since = self._said = now

    def look(self, coordinator: Coordinator, whom: str, now: float) -> None:
        """whom: in words, as of now; empty when nobody waits."""
        step = (coordinator.epoch, coordinator.version + 1)
        if not whom or step != self._step:
            self._step, self._since, self._said = step, now, now
        elif now - self._said >= NOTICE:
            self._said = now
            log.info("waiting", extra={"step": step[1], "waiting_for": whom, "seconds": round(now - self._since)})
