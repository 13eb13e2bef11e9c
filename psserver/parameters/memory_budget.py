"""The bound on bytes in flight: pushes that are staged, and weights that are being sent while
others are applied.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pscommon.core.errors import InFlightError, InvalidRequestError

TURN_SECONDS = 1.0
"""How often somebody who waits looks whether the caller is still there."""


class MemoryClaim:
    """Bytes for one worker, waiting or granted. turn: wakes the one who waits for it, and nobody
    else.
    """

    __slots__ = ("nbytes", "turn", "worker")

    def __init__(self, worker: int, nbytes: int, lock: threading.Lock) -> None:
        self.worker = worker
        self.nbytes = nbytes
        self.turn = threading.Condition(lock)


class MemoryBudget:
    """`limit` bytes, granted in whole claims. Thread-safe.

    Fair: of those who wait, the worker that holds least comes first, then who came first; a
    claim that does not fit yet holds up the ones behind it, so that a large one is not passed
    over for ever.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._lock = threading.Lock()
        self._waiting: list[MemoryClaim] = []
        self._held: Counter[int] = Counter()

    @property
    def waiting(self) -> int:
        """Claims that wait."""
        return len(self._waiting)

    def take(
        self, worker: int, nbytes: int, seconds: float, alive: Callable[[], bool] = lambda: True
    ) -> MemoryClaim:
        """Waits for room. InFlightError: there was none within `seconds`; InvalidRequestError:
        there never can be.
        """
        if nbytes > self.limit:
            raise InvalidRequestError(
                f"{nbytes} bytes do not fit the server's --in-flight of {self.limit}: raise it, "
                f"or use more shards"
            )
        claim, deadline = MemoryClaim(worker, nbytes, self._lock), time.monotonic() + seconds
        with self._lock:
            self._waiting.append(claim)
            try:
                while self._next() is not claim or self.used + nbytes > self.limit:
                    left = deadline - time.monotonic()
                    if left <= 0 or not alive():
                        raise InFlightError(self._full(nbytes))
                    claim.turn.wait(min(left, TURN_SECONDS))
                self.used += nbytes
                self._held[worker] += nbytes
            finally:
                self._waiting.remove(claim)
                self._wake_next()
        return claim

    def give(self, claim: MemoryClaim) -> None:
        """What was taken is free again; once for each claim."""
        with self._lock:
            self.used -= claim.nbytes
            self._held[claim.worker] -= claim.nbytes
            if not self._held[claim.worker]:
                del self._held[claim.worker]
            self._wake_next()

    @contextmanager
    def lent(
        self, worker: int, nbytes: int, seconds: float, alive: Callable[[], bool]
    ) -> Iterator[None]:
        """take, and give at the end."""
        claim = self.take(worker, nbytes, seconds, alive)
        try:
            yield
        finally:
            self.give(claim)

    def _wake_next(self) -> None:
        """Only one can go on; when it does, it wakes the next."""
        if self._waiting:
            self._next().turn.notify()

    def _next(self) -> MemoryClaim:
        return min(self._waiting, key=lambda claim: self._held[claim.worker])

    def _full(self, nbytes: int) -> str:
        return f"{self.used} of {self.limit} bytes are in flight, no room for {nbytes} more (--in-flight)"
