"""Limit the bytes in flight: staged pushes, and weights being sent while updates are applied."""

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from pscommon.core.errors import InFlightError, InvalidRequestError
from pscommon.core.limits import MAX_PULLS_PER_WORKER, MAX_PUSHES_PER_WORKER
from psserver.parameters.staging import MemoryClaim
from psserver.waiting import Waiter, until


class MemoryBudget:
    """`limit` bytes, granted in whole claims. Thread-safe.

    Fair: the waiting worker that has the fewest bytes comes first, then the oldest claim. A claim
        that does not fit yet holds up the ones behind it, so that a large one does not starve.

    A worker has one pull at a time, and one push beside one that is not decided yet: it gives that
        one up with its next push. Its other claims wait, and hold up nothing. Observers (worker 0)
        may have any number.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._lock = threading.Lock()
        self._waiting: list[MemoryClaim] = []
        self._used_by_worker: Counter[int] = Counter()
        self._claims: Counter[tuple[int, bool]] = Counter()  # by worker and is_push

    @property
    def waiting(self) -> int:
        """The number of waiting claims."""
        return len(self._waiting)

    async def take(
        self, worker: int, nbytes: int, seconds: float, waiter: Waiter, *, is_push: bool
    ) -> MemoryClaim:
        """Wait for free bytes and return the claim, for a push or a pull.

        Raises InFlightError if there is none within `seconds`, InvalidRequestError if the claim can
        never fit.
        """
        if nbytes > self.limit:
            raise InvalidRequestError(
                f"{nbytes} bytes do not fit the server's --in-flight of {self.limit}. "
                f"Try: a larger `--in-flight`, or more shards"
            )
        claim = MemoryClaim(worker, nbytes, waiter.wake, is_push)
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
            if not self._is_eligible(claim):
                used = f"worker {worker} has another {'push' if is_push else 'pull'} in flight"
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
            self._claims[claim.worker, claim.is_push] += 1
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
            self._claims[claim.worker, claim.is_push] -= 1
            if not self._claims[claim.worker, claim.is_push]:
                del self._claims[claim.worker, claim.is_push]
            self._wake_next()

    def _wake_next(self) -> None:
        """Wake one claim; when it has its bytes it wakes the next."""
        if (claim := self._next()) is not None:
            claim.wake()

    def _next(self) -> MemoryClaim | None:
        eligible = filter(self._is_eligible, self._waiting)
        return min(eligible, key=lambda claim: self._used_by_worker[claim.worker], default=None)

    def _is_eligible(self, claim: MemoryClaim) -> bool:
        """Return whether the worker may have one more such claim."""
        limit = MAX_PUSHES_PER_WORKER if claim.is_push else MAX_PULLS_PER_WORKER
        return not claim.worker or self._claims[claim.worker, claim.is_push] < limit


def _is_watched(wake: Callable[[], None]) -> AbstractContextManager[None]:
    """Register nothing: the budget knows the waiting claims."""
    return nullcontext()
