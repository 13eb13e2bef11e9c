"""Values that a script reports, until the servers have them: at most one per second and name."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pscommon.core.errors import InvalidRequestError
from pscommon.core.limits import MAX_METRICS, MAX_NAME_CHARACTERS
from pscommon.core.metric_row import MIN_INTERVAL_SECONDS
from psworker.session import metrics


class ValueReport(NamedTuple):
    """A reported value.

    version: updates in the weights that the worker had then.
    time: when it was reported, by the clock of Reports.
    """

    name: str
    value: float
    version: int
    time: float


class _PendingValue(NamedTuple):
    """The newest value of a name while its turn has not come; reading `value` may wait for a
    device.
    """

    value: Any
    version: int
    time: float


class ReportBuffer:
    """The newest value of each name, to be sent with the next heartbeat. Safe to use from
    several threads.

    A value in the memory of a device is read, which waits for the device, only when its turn has
    come, and only in the thread that reports: between its turns reporting costs no
    synchronization.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._next: dict[str, float] = {}  # by name, when its turn comes
        self._held: dict[str, _PendingValue] = {}
        self._unsent: dict[str, ValueReport] = {}

    def add(self, values: Mapping[str, Any], version: int) -> None:
        """Take values by name. Raises InvalidRequestError for what is no number, and for a bad
        name.
        """
        now = self._now()
        read = {
            name: _PendingValue(_without_wait(name, value), version, now)
            for name, value in values.items()
        }
        with self._lock:
            self._check_names(read)
            self._held.update(read)
        self.settle()

    def settle(self, final: bool = False) -> None:
        """Read the values whose turn has come; final: all. To be called in the thread that
        reports.
        """
        if self._held:
            self._settle(lambda name, held: final or self._is_due(name))

    def unsent(self) -> Sequence[ValueReport]:
        """Return what the servers do not have yet. From any thread."""
        if self._held:
            self._settle(lambda name, held: isinstance(held.value, float) and self._is_due(name))
        with self._lock:
            return list(self._unsent.values())

    def confirm(self, sent: Sequence[ValueReport]) -> None:
        """Forget these, which the servers have now."""
        with self._lock:
            for report in sent:
                if self._unsent.get(report.name) is report:
                    del self._unsent[report.name]

    def age(self, report: ValueReport) -> float:
        """Return how many seconds ago a value was reported."""
        return max(0.0, self._now() - report.time)

    def _settle(self, is_due: Callable[[str, _PendingValue], bool]) -> None:
        with self._lock:
            due = {name: held for name, held in self._held.items() if is_due(name, held)}
            for name in due:
                del self._held[name]
                self._next[name] = self._now() + MIN_INTERVAL_SECONDS
        # outside the lock: a device may take long, and heartbeats must not wait for it
        read = [
            ValueReport(name, _number(name, held.value), held.version, held.time)
            for name, held in due.items()
        ]
        with self._lock:
            self._unsent.update({report.name: report for report in read})
        for report in read:
            metrics.reported(report.name, report.value)

    def _is_due(self, name: str) -> bool:
        return self._now() >= self._next.get(name, -float("inf"))

    def _check_names(self, values: Mapping[str, _PendingValue]) -> None:
        for name in values:
            if not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
                raise InvalidRequestError(
                    f"job.report got the name {name[:40]!r}: a name has 1 to "
                    f"{MAX_NAME_CHARACTERS} printable characters"
                )
        if len({*values, *self._held, *self._next}) > MAX_METRICS:
            raise InvalidRequestError(f"job.report got more than {MAX_METRICS} different names")


def _without_wait(name: str, value: Any) -> Any:
    """The value as a float; a tensor in a device's memory as a copy that later steps do not
    change.
    """
    if hasattr(value, "detach"):
        value = value.detach()  # float() of a tensor that requires grad gives a warning
        if value.numel() != 1:
            raise InvalidRequestError(
                f"job.report({name}=...) takes one number, not {value.numel()}"
            )
        if value.device.type != "cpu":
            return value.clone()
    return _number(name, value)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(f"job.report({name}=...) takes a number: {error}") from error
