"""The time in which the first workers have to come."""

import time
from collections.abc import Callable

from pscommon.core.errors import TooFewWorkersError
from psserver.core.job.coordinator import CoordinatorMachine


class FirstWorkers:
    """Lasts while somebody is here and --min-workers are not. seconds: --join-timeout; whom: who
    is waited for.
    """

    def __init__(self, seconds: float, whom: Callable[[], str]) -> None:
        self._seconds, self._whom = seconds, whom
        self._since: float | None = None

    def look(self, coordinator: CoordinatorMachine) -> None:
        gathering = (
            coordinator.begun and not coordinator.started and coordinator.membership.registered()
        )
        self._since = (self._since or time.monotonic()) if gathering else None

    def check(self) -> None:
        """TooFewWorkersError for those who came, if the others did not within join_timeout of
        the first one.
        """
        if self._since is not None and (waited := time.monotonic() - self._since) > self._seconds:
            raise TooFewWorkersError(f"after {waited:.0f} s: {self._whom()}")
