"""Pushes that every shard has staged, in order of arrival, and what rounds look up in them: also
the first of the workers that may not be too far ahead of the slowest one (ssp).
"""

import heapq
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pscommon.core.log_entries import PushKey, Staged
from psserver.core.workers.smallest import Smallest


class ReadyPushes(dict[PushKey, Staged]):
    """The ready pushes by key, in order of arrival. Only `add`, `discard` and `replace` change it.

    A lookup costs the same for any number of pushes. A worker has one or few.

    Attributes:
        by_worker: For each worker with a ready push, the places of its pushes in the order of
            arrival, by number of the push.
        arrived: Pushes that have become ready; the reader clears it.
        changed: Workers whose ready pushes have changed; the reader clears it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.arrived: list[PushKey] = []
        self.changed: set[int] = set()
        self.by_worker: dict[int, dict[int, int]] = {}
        self._arrival_count = 0
        self._bases = Smallest()

    def add(self, key: PushKey, staged: Staged) -> None:
        """Add a push that is not ready yet."""
        self[key] = staged
        self._arrival_count += 1
        self.by_worker.setdefault(key.worker, {})[key.seq] = self._arrival_count
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
        arrivals = self.by_worker[key.worker]
        del arrivals[key.seq]
        if not arrivals:
            del self.by_worker[key.worker]

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
    def oldest_base(self) -> int | None:
        """The smallest version that a push was computed from; None without a push."""
        return self._bases.value

    def oldest(self, worker: int) -> PushKey:
        """Return the oldest push of a worker, which has one."""
        return PushKey(worker, min(self.by_worker[worker]))

    def arrival(self, worker: int) -> int | None:
        """Return the place of a worker's first push in the order of arrival; None without one."""
        arrivals = self.by_worker.get(worker)
        return min(arrivals.values()) if arrivals is not None else None


class WaitingPush(NamedTuple):
    """The oldest ready push of a worker.

    Attributes:
        clock: Clock of the worker.
        arrival: Place of the push in the order of arrival.
        worker: Number of the worker.
    """

    clock: int
    arrival: int
    worker: int


class WaitingPushes:
    """Finds the push that arrived first, of the workers whose clock is not above a limit.

    A push moves once from the heap by clock to the heap by arrival. A push that is decided, or
    whose worker has another clock, is not removed at once: `first` skips it.
    """

    def __init__(self) -> None:
        self._ahead: list[WaitingPush] = []
        self._due: list[tuple[int, WaitingPush]] = []

    def add(self, push: WaitingPush) -> None:
        """Add a push. Repeating it is harmless."""
        heapq.heappush(self._ahead, push)

    def first(self, limit: int, is_valid: Callable[[WaitingPush], bool]) -> WaitingPush | None:
        """Return the first push, which stays.

        Args:
            limit: Largest clock of its worker.
            is_valid: Returns whether a push still waits.
        """
        while self._ahead and self._ahead[0].clock <= limit:
            push = heapq.heappop(self._ahead)
            heapq.heappush(self._due, (push.arrival, push))
        while self._due:
            push = self._due[0][1]
            if is_valid(push) and push.clock <= limit:
                return push
            heapq.heappop(self._due)
            if is_valid(push):  # the smallest clock has decreased
                heapq.heappush(self._ahead, push)
        return None
