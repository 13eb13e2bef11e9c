"""Limit the bytes in flight: staged pushes, and weights being sent while updates are applied."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pscommon.core.errors import InFlightError, InvalidRequestError

CALLER_CHECK_INTERVAL_SECONDS = 1.0
"""Seconds between checks that the caller of a waiting claim is still connected."""


class MemoryClaim:
    """Bytes for one worker, waiting or granted.

    granted: condition that wakes only the thread of this claim.
    """

    __slots__ = ("granted", "nbytes", "worker")

    def __init__(self, worker: int, nbytes: int, lock: threading.Lock) -> None:
        self.worker = worker
        self.nbytes = nbytes
        self.granted = threading.Condition(lock)


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

    def take(
        self,
        worker: int,
        nbytes: int,
        seconds: float,
        is_connected: Callable[[], bool] = lambda: True,
    ) -> MemoryClaim:
        """Wait for free bytes and return the claim.

        Raises InFlightError if there is none within `seconds`, InvalidRequestError if the claim can
        never fit.
        """
        if nbytes > self.limit:
            raise InvalidRequestError(
                f"{nbytes} bytes do not fit the server's --in-flight of {self.limit}. "
                f"Try: a larger `--in-flight`, or more shards"
            )
        claim, deadline = MemoryClaim(worker, nbytes, self._lock), time.monotonic() + seconds
        with self._lock:
            self._waiting.append(claim)
            try:
                while self._next() is not claim or self.used + nbytes > self.limit:
                    remaining = deadline - time.monotonic()
                    if remaining <= 0 or not is_connected():
                        raise InFlightError(self._full(nbytes))
                    claim.granted.wait(min(remaining, CALLER_CHECK_INTERVAL_SECONDS))
                self.used += nbytes
                self._used_by_worker[worker] += nbytes
            finally:
                self._waiting.remove(claim)
                self._wake_next()
        return claim

    def release(self, claim: MemoryClaim) -> None:
        """Free a claim's bytes; to be called once for each claim."""
        with self._lock:
            self.used -= claim.nbytes
            self._used_by_worker[claim.worker] -= claim.nbytes
            if not self._used_by_worker[claim.worker]:
                del self._used_by_worker[claim.worker]
            self._wake_next()

    @contextmanager
    def borrow(
        self, worker: int, nbytes: int, seconds: float, is_connected: Callable[[], bool]
    ) -> Iterator[None]:
        """Take bytes, and release them at the end."""
        claim = self.take(worker, nbytes, seconds, is_connected)
        try:
            yield
        finally:
            self.release(claim)

    def _wake_next(self) -> None:
        """Wake one thread; when it has its bytes it wakes the next."""
        if self._waiting:
            self._next().granted.notify()

    def _next(self) -> MemoryClaim:
        return min(self._waiting, key=lambda claim: self._used_by_worker[claim.worker])

    def _full(self, nbytes: int) -> str:
        used = f"{self.used} of {self.limit} bytes are in flight"
        return f"{used}, no room for {nbytes} more (--in-flight)"
