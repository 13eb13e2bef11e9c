"""Which batch of data goes to whom, and which have counted.

A loop (one `job.batches` call) is a numbered sequence of batches; what indices a number stands for is a pure function
of its LoopSpec, so only numbers are kept here. A batch is free, leased to a worker, or committed: committed in the same
decision that counts the push which used it, free again when its worker is lost or gives it back.

sync deals a whole draw at a time, one batch to every registered worker in worker order, when the first of them asks: so
who gets what is a pure function of the sequence and the roster, not of who asks first. async and ssp deal to whoever
asks, so faster workers take more.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from pscommon.core.loop import LoopSpec


class Loop:
    """The ledger of one loop."""

    def __init__(self, spec: LoopSpec) -> None:
        self.spec = spec
        self.ended = False
        self.dropped = 0
        self._cursor = 0
        self._returned: list[int] = []
        self._leases: dict[int, int] = {}
        self._dealt: dict[int, deque[int]] = {}
        self._sent: dict[int, deque[tuple[int, int]]] = {}
        self._committed_below = 0
        self._committed_above: set[int] = set()

    @property
    def committed(self) -> int:
        return self._committed_below + len(self._committed_above)

    @property
    def leased(self) -> int:
        return len(self._leases)

    @property
    def free(self) -> int:
        """Batches that nobody has."""
        return self.spec.total - self.committed - self.leased

    def holds(self, worker: int) -> bool:
        """Has this worker batches that have not counted yet?"""
        return worker in self._leases.values()

    def has_dealt(self, worker: int) -> bool:
        """Does a batch lie ready for this worker that it has not fetched?"""
        return bool(self._dealt.get(worker))

    def take(self, worker: int, received: int, count: int, together: Sequence[int]) -> list[int]:
        """Up to `count` batches for a worker that has got `received` so far: what was sent after those is sent again.

        together: the workers that a draw deals to, in order.
        """
        sent = self._sent.setdefault(worker, deque())
        while sent and sent[0][0] <= received:
            sent.popleft()
        if sent:
            return [number for _, number in sent]
        mine = self._dealt.setdefault(worker, deque())
        while len(mine) < count and self._deal(together):
            pass
        fresh = [mine.popleft() for _ in range(min(count, len(mine)))]
        sent.extend(enumerate(fresh, start=received + 1))
        return fresh

    def _deal(self, workers: Sequence[int]) -> bool:
        for worker in workers:
            number = self._next_free()
            if number is None:
                return False
            self._leases[number] = worker
            self._dealt.setdefault(worker, deque()).append(number)
        return bool(workers)

    def _next_free(self) -> int | None:
        if self._returned:
            return heapq.heappop(self._returned)
        while self._cursor < self.spec.total:
            self._cursor += 1
            if not self._is_committed(self._cursor - 1):
                return self._cursor - 1
        return None

    def _is_committed(self, number: int) -> bool:
        return number < self._committed_below or number in self._committed_above

    def commit(self, worker: int, number: int) -> bool:
        """The push that used this batch counts. False: the batch was not this worker's, so it counted elsewhere."""
        if self._leases.get(number) != worker:
            return False
        del self._leases[number]
        self._committed_above.add(number)
        while self._committed_below in self._committed_above:
            self._committed_above.remove(self._committed_below)
            self._committed_below += 1
        return True

    def drop(self, worker: int) -> None:
        """The worker went on to another loop without pushing these: its script threw them away."""
        for number in [n for n, holder in self._leases.items() if holder == worker]:
            self.commit(worker, number)
            self.dropped += 1

    def give_back(self, worker: int, numbers: Iterable[int] | None = None) -> None:
        """These batches (None: all) of a worker are free again."""
        held = [n for n, holder in self._leases.items() if holder == worker]
        freed = set(held) if numbers is None else set(held) & set(numbers)
        for number in freed:
            del self._leases[number]
            heapq.heappush(self._returned, number)
        if worker in self._dealt:
            self._dealt[worker] = deque(n for n in self._dealt[worker] if n not in freed)

    def state(self) -> dict[str, Any]:
        """What a snapshot keeps: only what has counted. Leases are void after a restart."""
        return {
            "spec": asdict(self.spec),
            "ended": self.ended,
            "dropped": self.dropped,
            "below": self._committed_below,
            "above": sorted(self._committed_above),
        }

    @staticmethod
    def restored(state: dict[str, Any]) -> "Loop":
        loop = Loop(LoopSpec(**state["spec"]))
        loop.ended, loop.dropped = state["ended"], state["dropped"]
        loop._committed_below = loop._cursor = state["below"]
        loop._committed_above = set(state["above"])
        return loop


class Ledger:
    """All loops of the job."""

    def __init__(self) -> None:
        self.loops: dict[int, Loop] = {}

    def open(self, worker: int, spec: LoopSpec) -> Loop:
        """The loop that a worker is at; ValueError if others described it differently."""
        for number, earlier in self.loops.items():
            if number < spec.loop:
                earlier.drop(worker)
        loop = self.loops.setdefault(spec.loop, Loop(spec))
        if loop.spec != spec:
            raise ValueError(f"loop {spec.loop} is {loop.spec}; this worker asks for {spec}")
        return loop

    def give_back(self, worker: int) -> None:
        for loop in self.loops.values():
            loop.give_back(worker)

    def state(self) -> list[dict[str, Any]]:
        return [loop.state() for loop in self.loops.values()]

    def restore(self, states: Iterable[dict[str, Any]]) -> None:
        self.loops = {state["spec"]["loop"]: Loop.restored(state) for state in states}
