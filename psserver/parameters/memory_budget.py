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

    wake: called, without waiting, when the claim may be granted.
    """

    __slots__ = ("nbytes", "wake", "worker")

    def __init__(self, worker: int, nbytes: int, wake: Callable[[], None]) -> None:
        self.worker = worker
        self.nbytes = nbytes
        self.wake = wake


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
        granted, deadline = threading.Condition(self._lock), time.monotonic() + seconds
        claim = self.request(worker, nbytes, granted.notify)
        try:
            while not self.try_grant(claim):
                with self._lock:
                    remaining = deadline - time.monotonic()
                    if remaining <= 0 or not is_connected():
                        raise self.full(claim)
                    if not self._fits(claim):
                        granted.wait(min(remaining, CALLER_CHECK_INTERVAL_SECONDS))
        except BaseException:
            self.withdraw(claim)
            raise
        return claim

    def request(self, worker: int, nbytes: int, wake: Callable[[], None]) -> MemoryClaim:
        """Return a new claim that waits for bytes; `try_grant` grants it, `withdraw` ends it.

        wake: called, without waiting, when the claim may be granted.

        Raises InvalidRequestError if the claim can never fit.
        """
        if nbytes > self.limit:
            raise InvalidRequestError(
                f"{nbytes} bytes do not fit the server's --in-flight of {self.limit}. "
                f"Try: a larger `--in-flight`, or more shards"
            )
        claim = MemoryClaim(worker, nbytes, wake)
        with self._lock:
            self._waiting.append(claim)
        return claim

    def try_grant(self, claim: MemoryClaim) -> bool:
        """Grant a waiting claim if it is the next one and fits. Return whether it did."""
        with self._lock:
            if not self._fits(claim):
                return False
            self._waiting.remove(claim)
            self.used += claim.nbytes
            self._used_by_worker[claim.worker] += claim.nbytes
            self._wake_next()
            return True

    def withdraw(self, claim: MemoryClaim) -> None:
        """End a claim that still waits."""
        with self._lock:
            if claim in self._waiting:
                self._waiting.remove(claim)
                self._wake_next()

    def full(self, claim: MemoryClaim) -> InFlightError:
        """Return the error for a claim that was not granted in time."""
        used = f"{self.used} of {self.limit} bytes are in flight"
        return InFlightError(f"{used}, no room for {claim.nbytes} more (--in-flight)")

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
        """Wake one claim; when it has its bytes it wakes the next."""
        if self._waiting:
            self._next().wake()

    def _fits(self, claim: MemoryClaim) -> bool:
        return self._next() is claim and self.used + claim.nbytes <= self.limit

    def _next(self) -> MemoryClaim:
        return min(self._waiting, key=lambda claim: self._used_by_worker[claim.worker])
