"""The batches of one loop that this worker has leased from the job's ledger."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import repeat

import torch

from pscommon.core.data_loop import LoopSpec
from pscommon.core.data_stream import Spec
from pscommon.core.log_entries import BatchKey
from pscommon.core.script_place import PassName
from psworker.core.results import Lease
from psworker.session.session import Session

MAX_DROPS_PER_REQUEST = 10_000

LEASED_WORK_SECONDS, MAX_LEASED_COUNT = 0.05, 16
"""Work that a worker leases with one request, and the most batches of it. A request then costs
little beside the work, and at the end of a loop no worker waits long for another one's batches.
"""


NEWEST_INTERVAL_RATIO = 0.25
"""Weight of the newest interval in the mean."""


class ScriptPace:
    """The mean time between two batches that a script takes.

    Args:
        now: Returns the time in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._taken_at: float | None = None
        self._interval: float | None = None

    def take(self) -> None:
        """Record that the script takes a batch."""
        now = self._now()
        if self._taken_at is not None:
            newest = now - self._taken_at
            before = newest if self._interval is None else self._interval
            self._interval = before + NEWEST_INTERVAL_RATIO * (newest - before)
        self._taken_at = now

    def pause(self) -> None:
        """Leave out the time until the next batch: the script waits for others."""
        self._taken_at = None

    def count_in(self, seconds: float, limit: int) -> int:
        """Return how many batches the script takes in this time: 1 to `limit`, 1 if unknown."""
        if self._interval is None:
            return 1
        if limit * self._interval <= seconds:  # also if a coarse clock has measured 0
            return limit
        return max(1, int(seconds / self._interval))


class LeasedBatches:
    """Iterates over the numbers of leased batches of one loop.

    The iteration ends when the ledger has none at the moment; `wait` then returns whether there
    are more.

    Attributes:
        name: Name of the pass.
        spec: The loop; with the job's number and first epoch once a number is leased.
        share: Number of the loop's batches that this worker can expect, as of the first answer of
            the ledger; None before, and of a stream.
    """

    def __init__(self, session: Session, spec: Spec, name: PassName) -> None:
        self._session = session
        self.spec = spec
        self.name = name
        self._ready: deque[int] = deque()
        # unused batches by number, with how many batches of the same push follow each
        self._unused: dict[int, int | None] = {}
        self._evaluated: list[BatchKey] = []
        self._pace = ScriptPace(session.client.clock.now)
        self._has_ended = False
        self._is_idle = False  # the worker waits outside of rounds
        self._leased_count = 0
        self._steps = session.stats.steps
        self.share: int | None = None

    @property
    def is_empty(self) -> bool:
        """The loop ended before this worker got a batch of it."""
        return self._has_ended and not self._leased_count

    @property
    def is_finished(self) -> bool:
        return self._has_ended or self._session.client.stopping

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        """Return the next number, which is leased now if there is none.

        A worker that had to rejoin for this has got none.
        """
        if not self._ready and not self.is_finished:
            with self._session.rejoin_on_fence():
                lease = self._session.client.data.next_batches(
                    self.spec,
                    self._count_to_lease(),
                    self._is_idle,
                    self._session.loops.place(self.name),
                )
                self._take(lease)
                if lease.sat_out and not self._is_idle:
                    self._session.refresh(keeps_weights=not self._has_stepped)
        if not self._ready or self.is_finished:
            raise StopIteration
        return self._ready.popleft()

    def wait(self) -> bool:
        """Wait, outside of rounds, until there are more batches; return False at the loop's end.

        Afterwards the model has the newest weights, or those that the script has set to evaluate
        them.
        """
        if self._has_stepped:
            self._session.store_buffers()
        self._pace.pause()
        self._is_idle = True
        while not self._ready and not self.is_finished:
            with suppress(StopIteration):
                self._ready.appendleft(next(self))
        self._is_idle = False
        if not self._session.client.stopping:
            self._session.refresh(keeps_weights=not self._has_stepped)
        return not self.is_finished

    @property
    def waits_for_rest(self) -> bool:
        """The loop has ended for this worker only: the script has batches that it did not push."""
        return self._has_ended and bool(self._session.consumed.batches)

    def continue_after_rest(self) -> bool:
        """Return whether the script has pushed its rest, so that `wait` finds the loop's end."""
        self._has_ended = self.waits_for_rest
        return not self._has_ended

    def _take(self, lease: Lease) -> None:
        self._session.reset_rejoin_count()
        if lease.loop is not None:  # the job's number of the pass
            self.spec = replace(self.spec, loop=lease.loop)
        if isinstance(self.spec, LoopSpec):  # a stream has no length
            if lease.first_epoch is not None:
                self.spec = replace(self.spec, first_epoch=lease.first_epoch)
            if self.share is None and (lease.numbers or lease.end):
                self.share = lease.share
        self._ready.extend(lease.numbers)
        self._leased_count += len(lease.numbers)
        self._unused.update(zip(lease.numbers, lease.following or repeat(None), strict=False))
        self._has_ended = lease.end and not lease.numbers
        # otherwise the loop ends only for this worker, once its batches are used
        if self._has_ended and not self._session.consumed.batches:
            self._session.loops.passed(self.name)

    @property
    def _has_stepped(self) -> bool:
        """False in a pass that evaluates: weights that the script has set stay."""
        return self._session.stats.steps > self._steps

    def _count_to_lease(self) -> int:
        """Return how many batches to ask for.

        More than one only where each worker takes batches at its own pace, and at most half of
        what this worker can still expect: the last ones are for the worker that is free first.
        """
        is_free = self._session.client.policy in ("async", "ssp")
        if not is_free or self.share is None or not isinstance(self.spec, LoopSpec):
            return 1
        rest = (self.share - self._leased_count) // 2
        return self._pace.count_in(LEASED_WORK_SECONDS, max(1, min(rest, MAX_LEASED_COUNT)))

    def use(self, key: BatchKey, samples: int, all_samples: int) -> bool:
        """Record that the script receives this batch; return False if its lease has ended.

        A batch that it receives while gradients are off has no weight in the next step.

        samples, all_samples: Those that count on this rank, and on all ranks of the group.
        """
        if key.number not in self._unused:
            return False
        self._pace.take()
        following = self._unused.pop(key.number)
        evaluates = not torch.is_grad_enabled()
        if evaluates:
            self._evaluated.append(key)
        self._session.consumed.add(key, None if evaluates else samples, all_samples, following)
        return True

    def drop_evaluated(self) -> None:
        """Commit batches that were only evaluated, if the loop has ended: no step commits them."""
        keys, self._evaluated = self._evaluated, []
        if keys and self._has_ended:
            consumed, dropped = self._session.consumed, set(keys)
            consumed.batches = tuple(key for key in consumed.batches if key not in dropped)
            for start in range(0, len(keys), MAX_DROPS_PER_REQUEST):
                some = keys[start : start + MAX_DROPS_PER_REQUEST]
                with self._session.rejoin_on_fence():
                    self._session.client.data.return_batches(some, used=True)

    def find_end(self, key: BatchKey) -> None:
        """Report a batch without samples: its source ends before it."""
        if key.number in self._unused:
            del self._unused[key.number]
            with self._session.rejoin_on_fence():
                self._session.client.data.return_batches([key])

    def forget(self) -> None:
        """Drop all unused batches: the job has given them to other workers.

        Batches that the loader has fetched already are skipped.
        """
        self._ready.clear()
        self._unused.clear()
        self._evaluated.clear()

    def release(self) -> None:
        """Return all unused batches to the job; the pass goes on, and leases others."""
        with self._session.rejoin_on_fence():
            self.give_back()

    def give_back(self) -> None:
        """Return all unused batches to the job."""
        unused, self._unused = sorted(self._unused), {}
        self._ready.clear()
        if unused:
            self._session.client.data.return_batches(
                [BatchKey(self.spec.loop, number) for number in unused]
            )
