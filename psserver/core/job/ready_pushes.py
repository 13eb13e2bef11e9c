"""Pushes that every shard has staged, in order of arrival, and what rounds look up in them."""

from collections.abc import Collection, Iterator

from pscommon.core.log_entries import PushKey, Staged
from psserver.core.workers.smallest import Smallest


class ReadyPushes(dict[PushKey, Staged]):
    """The ready pushes by key, in order of arrival. Only `add`, `discard` and `replace` change it.

    A lookup costs the same for any number of pushes. A worker has one or few.

    Attributes:
        arrived: Pushes that have become ready; the reader clears it.
        changed: Workers whose ready pushes have changed; the reader clears it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.arrived: list[PushKey] = []
        self.changed: set[int] = set()
        self._arrivals: dict[int, dict[int, int]] = {}  # by worker and number of the push
        self._arrival_count = 0
        self._bases = Smallest()

    def add(self, key: PushKey, staged: Staged) -> None:
        """Add a push that is not ready yet."""
        self[key] = staged
        self._arrival_count += 1
        self._arrivals.setdefault(key.worker, {})[key.seq] = self._arrival_count
        self._bases.add(staged.base)
        self.arrived.append(key)
        self.changed.add(key.worker)

    def discard(self, key: PushKey) -> None:
        """Remove a push, if it is ready."""
        staged = self.pop(key, None)
        if staged is None:
            return
        self._bases.remove(staged.base)
        self.changed.add(key.worker)
        arrivals = self._arrivals[key.worker]
        del arrivals[key.seq]
        if not arrivals:
            del self._arrivals[key.worker]

    def replace(self, keys: Iterator[PushKey]) -> None:
        """Bring the pushes into this order of arrival, as if they all had just arrived."""
        pushes = dict(self)
        for key in pushes:
            self.discard(key)
        self.arrived.clear()
        for key in keys:
            self.add(key, pushes[key])

    def look_again(self) -> None:
        """Let all pushes be looked at again: the rules have changed."""
        self.arrived = [*self]

    @property
    def workers(self) -> Collection[int]:
        """Workers with a ready push."""
        return self._arrivals.keys()

    @property
    def oldest_base(self) -> int | None:
        """The smallest version that a push was computed from; None without a push."""
        return self._bases.value

    def oldest(self, worker: int) -> PushKey:
        """Return the oldest push of a worker, which has one."""
        return PushKey(worker, min(self._arrivals[worker]))

    def arrival(self, worker: int) -> int | None:
        """Return the place of a worker's first push in the order of arrival; None without one."""
        arrivals = self._arrivals.get(worker)
        return min(arrivals.values()) if arrivals is not None else None
