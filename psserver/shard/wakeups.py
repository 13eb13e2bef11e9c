"""Wait for a shard to change.

A thread that waits for one push wakes when that push is decided. With many workers in async, waking
all threads at every update would cost too much.
"""

import threading
from collections.abc import Iterable

from pscommon.core.log_entries import Apply, Entry, Evict, Measure, PushKey, Reject


class PushWaiters(threading.Condition):
    """A condition on which a thread can also wait for one push alone.

    notify_all: any part of the state may have changed.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        super().__init__(self._lock)
        self._conditions: dict[PushKey, list[threading.Condition]] = {}

    def wait(self, timeout: float | None = None, push: PushKey | None = None) -> bool:
        """Wait for any change, or until this push may be decided."""
        if push is None:
            return super().wait(timeout)
        waiting, condition = self._conditions.setdefault(push, []), threading.Condition(self._lock)
        waiting.append(condition)
        try:
            return condition.wait(timeout)
        finally:
            waiting.remove(condition)
            if not waiting:
                self._conditions.pop(push, None)

    def notify_all(self) -> None:
        super().notify_all()
        self._notify(list(self._conditions))

    def notify_entry(self, entry: Entry) -> None:
        """Wake the threads that wait for the entry's pushes, and those that wait for any change."""
        match entry:
            case Apply():
                keys = [contribution.key for contribution in entry.contributions]
            case Measure():
                return  # nothing has become of its pushes yet
            case Reject():
                keys = [entry.key]
            case Evict():
                keys = [key for key in self._conditions if key.worker == entry.worker]
            case _:
                keys = list(self._conditions)
        super().notify_all()
        self._notify(keys)

    def _notify(self, keys: Iterable[PushKey]) -> None:
        for key in keys:
            for condition in self._conditions.get(key, ()):
                condition.notify_all()
