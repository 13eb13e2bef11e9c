"""Buffer of the values that a script reports: at most one per second and name is sent."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pscommon.core.errors import InvalidRequestError
from pscommon.core.limits import MAX_METRICS, MAX_NAME_CHARACTERS
from pscommon.core.metric_row import MIN_INTERVAL_SECONDS
from psworker.session import metrics


class ValueReport(NamedTuple):
    """A reported value.

    Attributes:
        version: Version of the worker's weights at the time of the report.
        time: Time of the report, by the clock of ReportBuffer.
    """

    name: str
    value: float
    version: int
    time: float


class ReportBuffer:
    """The newest value of each name, to be sent with the next heartbeat. Thread-safe.

    A value in device memory is read only when it is due, and only in the thread that reports:
    reading it waits for the device. Other reports cost no synchronization.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._next: dict[str, float] = {}  # time by name at which a value is due again
        self._pending: dict[str, ValueReport] = {}  # of some the value is a tensor
        self._unsent: dict[str, ValueReport] = {}

    def add(self, values: Mapping[str, Any], version: int) -> None:
        """Take values by name.

        Raises:
            InvalidRequestError: A value is not a number, or a name is invalid.
        """
        now = self._now()
        read = {
            name: ValueReport(name, number_soon(name, value), version, now)
            for name, value in values.items()
        }
        with self._lock:
            self._check_names(read)
            self._pending.update(read)
        self.settle()

    def settle(self, final: bool = False) -> None:
        """Read the values that are due; call it in the thread that reports.

        final: Read all values.
        """
        if self._pending:
            self._settle(lambda name, pending: final or self._is_due(name))

    def unsent(self) -> Sequence[ValueReport]:
        """Return the values that the servers have not confirmed. Call it from any thread."""
        if self._pending:
            self._settle(
                lambda name, pending: isinstance(pending.value, float) and self._is_due(name)
            )
        with self._lock:
            return list(self._unsent.values())

    def confirm(self, sent: Sequence[ValueReport]) -> None:
        """Remove values that the servers have received."""
        with self._lock:
            for report in sent:
                if self._unsent.get(report.name) is report:
                    del self._unsent[report.name]

    def age(self, report: ValueReport) -> float:
        """Return how many seconds ago a value was reported."""
        return max(0.0, self._now() - report.time)

    def _settle(self, is_due: Callable[[str, ValueReport], bool]) -> None:
        with self._lock:
            due = {name: value for name, value in self._pending.items() if is_due(name, value)}
            for name in due:
                del self._pending[name]
                self._next[name] = self._now() + MIN_INTERVAL_SECONDS
        # Outside the lock: a device may take long, and heartbeats must not wait for it.
        read = [
            report._replace(value=_number(report.name, report.value)) for report in due.values()
        ]
        with self._lock:
            self._unsent.update({report.name: report for report in read})
        for report in read:
            metrics.reported(report.name, report.value)

    def _is_due(self, name: str) -> bool:
        return self._now() >= self._next.get(name, -float("inf"))

    def _check_names(self, values: Mapping[str, ValueReport]) -> None:
        for name in values:
            if not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
                raise InvalidRequestError(
                    f"job.report got the name {name[:40]!r}: a name has 1 to "
                    f"{MAX_NAME_CHARACTERS} printable characters"
                )
        if len({*values, *self._pending, *self._next}) > MAX_METRICS:
            raise InvalidRequestError(f"job.report got more than {MAX_METRICS} different names")


def number_soon(name: str, value: Any) -> Any:
    """Return the value as a float, or a tensor in device memory as a copy.

    Later steps do not change the copy.
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
