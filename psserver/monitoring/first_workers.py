"""The time within which the first workers must join."""

import time
from collections.abc import Callable

from pscommon.core.errors import TooFewWorkersError
from psserver.core.coordinator.machine import CoordinatorMachine


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
            coordinator.begun and not coordinator.started and coordinator.membership.registered()
        )
        self._since = (self._since or time.monotonic()) if is_waiting else None

    def check(self) -> None:
        """Check that the wait is not too long.

        Raises:
            TooFewWorkersError: The other workers did not join within --join-timeout.
        """
        if self._since is not None and (waited := time.monotonic() - self._since) > self._seconds:
            raise TooFewWorkersError(f"after {waited:.0f} s: {self._missing()}")
