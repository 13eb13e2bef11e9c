"""Batch numbers of a loop: a pool of those that are free, taken or committed, and leases of those
dealt to a worker and not yet counted. `LoopLedger.lose` (loop.py) frees those of a worker that is
gone.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class BatchPool:
    """Gives out the smallest returned number, or else the next fresh one.

    total: count of numbers in the pool; None: not known yet.
    """

    def __init__(self, total: int | None = None) -> None:
        self.total = total
        self._cursor = 0
        self._returned: list[int] = []
        self._below = 0
        self._above: set[int] = set()

    @property
    def committed(self) -> int:
        return self._below + len(self._above)

    @property
    def first_open(self) -> int:
        """The smallest number that is not committed."""
        return self._below

    def peek(self) -> int | None:
        """Return the number that `take` would return; None if none is free."""
        if self._returned:
            return self._returned[0]
        # after a restore, committed numbers lie ahead of the cursor
        while self._cursor < self._below or self._cursor in self._above:
            self._cursor += 1
        return self._cursor if self.total is None or self._cursor < self.total else None

    def take(self) -> int:
        """Take the number that `peek` returns."""
        number = self.peek()
        assert number is not None, "peek first"
        if self._returned:
            return heapq.heappop(self._returned)
        self._cursor += 1
        return number

    def end(self, total: int) -> None:
        """Limit the pool to `total` numbers."""
        self.total = total
        self._returned = [number for number in self._returned if number < total]
        heapq.heapify(self._returned)

    def put_back(self, number: int) -> None:
        """Free a taken number."""
        heapq.heappush(self._returned, number)

    def commit(self, number: int) -> None:
        """Commit a number."""
        self._above.add(number)
        while self._below in self._above:
            self._above.remove(self._below)
            self._below += 1

    def state(self) -> dict[str, Any]:
        """Return the state, JSON-ready; `recovered` is the inverse."""
        above, returned = sorted(self._above), sorted(self._returned)
        return {"below": self._below, "above": above, "cursor": self._cursor, "returned": returned}

    @staticmethod
    def restored(total: int | None, state: Mapping[str, Any]) -> "BatchPool":
        """Return a pool with the committed numbers of the state; all others are free."""
        pool = BatchPool(total)
        pool._below = pool._cursor = state["below"]
        pool._above = set(state["above"])
        return pool

    @staticmethod
    def recovered(total: int | None, state: Mapping[str, Any]) -> "BatchPool":
        """Return a pool with the exact state."""
        pool = BatchPool.restored(total, state)
        pool._cursor, pool._returned = state["cursor"], list(state["returned"])
        return pool


class BatchLeases:
    """Batch numbers and the workers that lease them, in the order in which they were dealt.

    A dealt number stays ready until its worker asks for it. A sent number is kept until the worker
    acknowledges it, because the response may be lost.

    Attributes:
        dealt: The ready numbers of each worker that has some, in order; only methods change them.
        revision: Changes with every deal, send, acknowledgement and end of a lease.
    """

    def __init__(self) -> None:
        self.revision = 0
        self._holders: dict[int, int] = {}
        self._leased: dict[int, dict[int, None]] = {}  # the same by worker, in the same order
        self.dealt: dict[int, deque[int]] = {}
        self._sent: dict[int, deque[tuple[int, int]]] = {}
        self._received: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def leased_by(self, worker: int, numbers: Iterable[int] | None = None) -> list[int]:
        """Return those of these numbers that a worker leases, in ascending order.

        Without `numbers` return all that it leases, in the order in which they were dealt.
        """
        if numbers is None:
            return list(self._leased.get(worker, ()))
        return sorted({number for number in numbers if self.holds(worker, number)})

    def has_sent(self, worker: int) -> bool:
        """Return whether a worker has received batches that have not counted yet."""
        return len(self._leased.get(worker, ())) > len(self.ready(worker))

    def holds(self, worker: int, number: int) -> bool:
        """Return whether this worker leases this number."""
        return self._holders.get(number) == worker

    def items(self) -> list[tuple[int, int]]:
        """Return pairs of number and worker, in the order in which they were dealt."""
        return list(self._holders.items())

    def ready(self, worker: int) -> Sequence[int]:
        """Return the numbers that are dealt to a worker and not yet sent, in order."""
        return self.dealt.get(worker, ())

    def deal(self, worker: int, number: int) -> None:
        """Lease the number to this worker."""
        self.revision += 1
        self._holders[number] = worker
        self._leased.setdefault(worker, {})[number] = None
        self.dealt.setdefault(worker, deque()).append(number)

    def has_asked(self, worker: int) -> bool:
        """Return whether this worker has asked for numbers."""
        return worker in self._received

    def is_late(self, worker: int, received: int) -> bool:
        """Return whether the request is outdated: the worker acknowledged more numbers before."""
        return received < self._received.get(worker, 0)

    def again(self, worker: int, received: int) -> list[int]:
        """Return the numbers sent to a worker after its first `received`.

        The first `received` numbers are acknowledged, so they are no longer kept for a retry.
        """
        sent = self._sent.setdefault(worker, deque())
        self.revision += self._received.get(worker) != received
        self._received[worker] = received
        while sent and sent[0][0] <= received:
            sent.popleft()
        return [number for _, number in sent]

    def send(self, worker: int, received: int) -> int:
        """Return the worker's first ready number; mark it as sent, at position `received` + 1."""
        self.revision += 1
        number = self.dealt[worker][0]
        self._remove_ready(worker, number)
        self._sent[worker].append((received + 1, number))
        return number

    def end(self, worker: int, number: int) -> bool:
        """End the lease of a number. Return False if this worker does not lease it."""
        if not self.holds(worker, number):
            return False
        self.revision += 1
        del self._holders[number], self._leased[worker][number]
        if not self._leased[worker]:
            del self._leased[worker]
        if number in self.ready(worker):
            self._remove_ready(worker, number)
        return True

    def _remove_ready(self, worker: int, number: int) -> None:
        self.dealt[worker].remove(number)
        if not self.dealt[worker]:
            del self.dealt[worker]

    def forget(self, worker: int) -> None:
        """Discard what is ready for, sent to and acknowledged by a worker that has left."""
        self.revision += 1
        self.dealt.pop(worker, None)
        self._sent.pop(worker, None)
        self._received.pop(worker, None)

    def transfer(self, old: int, new: int) -> None:
        """Move all leases of `old` to `new`.

        They become ready again, in the order in which they were dealt, before those of `new`.
        """
        mine = self.leased_by(old)
        self.forget(old)
        self._holders.update(dict.fromkeys(mine, new))
        self._index_holders()
        if ready := deque([*mine, *self.ready(new)]):
            self.dealt[new] = ready

    def _index_holders(self) -> None:
        self._leased = {}
        for number, worker in self._holders.items():
            self._leased.setdefault(worker, {})[number] = None

    def state(self) -> dict[str, Any]:
        """Return the state, JSON-ready; `recovered` is the inverse.

        Mappings become pairs, because JSON keys are strings.
        """
        return {
            "leases": [list(pair) for pair in self._holders.items()],
            "dealt": [[worker, list(numbers)] for worker, numbers in sorted(self.dealt.items())],
            "sent": [
                [worker, [list(pair) for pair in sent]]
                for worker, sent in sorted(self._sent.items())
                if sent
            ],
            "received": [list(pair) for pair in sorted(self._received.items())],
        }

    @staticmethod
    def recovered(state: Mapping[str, Any]) -> "BatchLeases":
        leases = BatchLeases()
        leases._holders = dict(state["leases"])
        leases._index_holders()
        leases.dealt = {worker: deque(numbers) for worker, numbers in state["dealt"]}
        leases._sent = {
            worker: deque((place, number) for place, number in sent)
            for worker, sent in state["sent"]
        }
        leases._received = dict(state["received"])
        return leases
