"""Waiting for a shard to change. Who waits for a push is woken by what becomes of it, not by all
that is decided: with many workers in async, every update would wake everybody else."""

import threading
from collections.abc import Iterable

from pscommon.core.log_entries import Apply, Entry, Evict, Measure, PushKey, Reject


class PushWaiters(threading.Condition):
    """A condition in which one may also wait for a push alone. notify_all: everything may be
    different.
    """

    def __init__(self) -> None:
        self._guard = threading.RLock()
        super().__init__(self._guard)
        self._bells: dict[PushKey, list[threading.Condition]] = {}

    def wait(self, timeout: float | None = None, push: PushKey | None = None) -> bool:
        """For anything, or until something has become of this push."""
        if push is None:
            return super().wait(timeout)
        here, bell = self._bells.setdefault(push, []), threading.Condition(self._guard)
        here.append(bell)
        try:
            return bell.wait(timeout)
        finally:
            here.remove(bell)
            if not here:
                self._bells.pop(push, None)

    def notify_all(self) -> None:
        super().notify_all()
        self._ring(list(self._bells))

    def notify_of(self, entry: Entry) -> None:
        """This entry has been carried out: for those who wait for its pushes, and all who wait
        for anything.
        """
        match entry:
            case Apply():
                keys = [contribution.key for contribution in entry.contributions]
            case Measure():
                return  # nothing has become of its pushes yet
            case Reject():
                keys = [entry.key]
            case Evict():
                keys = [key for key in self._bells if key.worker == entry.worker]
            case _:
                keys = list(self._bells)
        super().notify_all()
        self._ring(keys)

    def _ring(self, keys: Iterable[PushKey]) -> None:
        for key in keys:
            for bell in self._bells.get(key, ()):
                bell.notify_all()
