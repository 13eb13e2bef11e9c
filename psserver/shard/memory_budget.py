"""Limit the bytes in flight: staged pushes, and weights being sent while updates are applied."""

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from pscommon.core.errors import InFlightError, InvalidRequestError
from psserver.parameters.staging import MemoryClaim
from psserver.waiting import Waiter, until


class MemoryBudget:
    """`limit` bytes, granted in whole claims. Thread-safe.

    Fair: the waiting worker that has the fewest bytes comes first, then the oldest claim. A claim
        that does not fit yet holds up the ones behind it, so that a large one does not starve.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._lock = threading.Lock()
        self._waiting: list[MemoryClaim] = []
        self._used_by_worker: Counter[int] = Counter()

    @property
    def waiting(self) -> int:
        """The number of waiting claims."""
        return len(self._waiting)

    async def take(self, worker: int, nbytes: int, seconds: float, waiter: Waiter) -> MemoryClaim:
        """Wait for free bytes and return the claim.

        Raises InFlightError if there is none within `seconds`, InvalidRequestError if the claim can
        never fit.
        """
        if nbytes > self.limit:
            raise InvalidRequestError(
                f"{nbytes} bytes do not fit the server's --in-flight of {self.limit}. "
                f"Try: a larger `--in-flight`, or more shards"
            )
        claim = MemoryClaim(worker, nbytes, waiter.wake)
        with self._lock:
            self._waiting.append(claim)
        granted = None
        try:
            granted = await until(partial(self._grant, claim), _is_watched, seconds, waiter)
        finally:
            if granted is None:
                self._withdraw(claim)
        if granted is None:
            used = f"{self.used} of {self.limit} bytes are in flight"
            raise InFlightError(f"{used}, no room for {nbytes} more (--in-flight)")
        return granted

    def _grant(self, claim: MemoryClaim) -> MemoryClaim | None:
        """Grant a waiting claim if it is the next one and fits; None otherwise."""
        with self._lock:
            if self._next() is not claim or self.used + claim.nbytes > self.limit:
                return None
            self._waiting.remove(claim)
            self.used += claim.nbytes
            self._used_by_worker[claim.worker] += claim.nbytes
            self._wake_next()
            return claim

    def _withdraw(self, claim: MemoryClaim) -> None:
        with self._lock:
            self._waiting.remove(claim)
            self._wake_next()

    def release(self, claim: MemoryClaim) -> None:
        """Free a claim's bytes; to be called once for each claim."""
        with self._lock:
            self.used -= claim.nbytes
            self._used_by_worker[claim.worker] -= claim.nbytes
            if not self._used_by_worker[claim.worker]:
                del self._used_by_worker[claim.worker]
            self._wake_next()

    def _wake_next(self) -> None:
        """Wake one claim; when it has its bytes it wakes the next."""
        if self._waiting:
            self._next().wake()

    def _next(self) -> MemoryClaim:
        return min(self._waiting, key=lambda claim: self._used_by_worker[claim.worker])


def _is_watched(wake: Callable[[], None]) -> AbstractContextManager[None]:
    """Register nothing: the budget knows the waiting claims."""
    return nullcontext()
