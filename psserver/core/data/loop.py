"""What the ledger of every loop keeps, whatever its data is: who has which batch, and what
became of it.

A batch is a number, and what a number stands for is a pure function of the loop's spec. It is
free, leased to a worker, or committed: committed in the same decision that counts the push which
used it, free again when its worker is lost or gives it back. Kinds of loops differ in what is
free and who gets it next.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pscommon.core.data_stream import Spec
from psserver.core.data.batch_leases import BatchLeases


class LoopLedger(ABC):
    """One loop.

    whereabouts: the first loop that each worker is still in. dropped: batches that their scripts
    threw away; they are committed. duplicates: batches in pushes that counted although the batch
    was not their worker's (any more): its samples count once more elsewhere. units: with
    --global-batch, how many batches a draw deals; None: one to each worker.
    """

    def __init__(self, spec: Spec, whereabouts: Mapping[int, int] = MappingProxyType({})) -> None:
        self.spec = spec
        self.ended = False
        self.dropped = 0
        self.duplicates = 0
        self.units: int | None = None
        self._whereabouts = whereabouts
        self._leases = BatchLeases()
        self._left_behind: dict[int, int] = {}

    @property
    def leased(self) -> int:
        return len(self._leases)

    @property
    @abstractmethod
    def committed(self) -> int:
        """Batches that have counted, or were dropped."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Every batch has counted."""

    @property
    def closed(self) -> bool:
        """It is over, and nothing that a worker does, or that becomes of it, changes anything
        here any more.
        """
        return self.ended and not self.leased and not self._left_behind

    def end(self) -> None:
        """Nobody gets anything of it any more, and what was sent is not sent again."""
        self.ended = True
        if not self.leased:
            self._leases = BatchLeases()

    @property
    def can_renumber(self) -> bool:
        """No batch is out whose number stands for something else when the loop gets more epochs."""
        return True

    def extend(self, spec: Spec) -> None:
        """More epochs of the same loop, which has not ended any more."""
        self.spec, self.ended = spec, False

    def dealt(self) -> tuple[Any, ...]:
        """Another value wherever something has been dealt, sent, or counted, or has come."""
        return self.ended, self.committed, self._leases.state()

    def holds(self, worker: int) -> bool:
        """Has this worker got batches that have not counted yet?"""
        return len(self._leases.held(worker)) > len(self._leases.ready(worker))

    def has_dealt(self, worker: int) -> bool:
        """Does a batch lie ready for this worker that it has not fetched, and may fetch now?"""
        return bool(self._leases.ready(worker))

    def is_late(self, worker: int, received: int) -> bool:
        """Was this asked before something that was answered since? Then nobody waits for an
        answer.
        """
        return self._leases.is_late(worker, received)

    def take(self, worker: int, received: int, count: int, together: Sequence[int]) -> list[int]:
        """Up to `count` batches for a worker that has got `received` so far: what was sent after
        those is sent again.

        together: the workers that a draw deals to, in order.
        """
        if again := self._leases.again(worker, received):
            return again
        here = [other for other in together if self._whereabouts.get(other, 0) <= self.spec.loop]
        while len(self._leases.ready(worker)) < count and self._may_draw(worker):
            if not self._draw(here):
                break
        numbers: list[int] = []
        while len(numbers) < count and self.has_dealt(worker):
            numbers.append(self._leases.send(worker, received + len(numbers)))
        return numbers

    def following(self, worker: int, numbers: Iterable[int]) -> list[int]:
        """For each of these batches of a worker, how many more belong to the same push; empty:
        they are independent.
        """
        return []

    @abstractmethod
    def _may_draw(self, worker: int) -> bool:
        """May this worker, which has used up what lay ready for it, have a draw made?"""

    @abstractmethod
    def _draw(self, workers: Sequence[int]) -> bool:
        """Deals to these workers. False: there is nothing to deal."""

    @abstractmethod
    def _count(self, number: int) -> None:
        """A batch that was leased is committed."""

    @abstractmethod
    def _free(self, number: int) -> None:
        """A batch that was leased is free."""

    def commit(self, worker: int, number: int) -> bool:
        """The push that used this batch counts. False: the batch was not this worker's, and this
        is a duplicate.
        """
        if self._leases.end(worker, number):
            self._count(number)
            return True
        if self._left_behind.get(number) == worker:
            del self._left_behind[number]
            self.dropped -= 1
            return True
        self.duplicates += 1
        return False

    def drop(self, worker: int, numbers: Iterable[int] | None = None) -> None:
        """These batches (None: all) of a worker will never be pushed, and nobody is to have
        them.
        """
        for number in self._held(worker, numbers):
            self.commit(worker, number)
            self.dropped += 1

    def leave(self, worker: int) -> None:
        """The worker went on to a later loop. What its script has got is dropped, unless its
        next push brings it; what had not been sent yet is free."""
        self.give_back(worker, list(self._leases.ready(worker)))
        held = self._leases.held(worker)
        self.drop(worker)
        self._left_behind.update(dict.fromkeys(held, worker))

    def settle(self, worker: int) -> None:
        """A push of this worker has counted: what it left behind before stays dropped."""
        if self._left_behind:
            self._left_behind = {
                n: holder for n, holder in self._left_behind.items() if holder != worker
            }

    def give_back(self, worker: int, numbers: Iterable[int] | None = None) -> None:
        """These batches (None: all) of a worker are free again."""
        for number in self._held(worker, numbers):
            self._leases.end(worker, number)
            self._free(number)

    def _held(self, worker: int, numbers: Iterable[int] | None) -> list[int]:
        if numbers is None:
            return self._leases.held(worker)
        return sorted({number for number in numbers if self._leases.holds(worker, number)})

    def lose(self, worker: int) -> None:
        """The worker is out of the job: what it holds is free again."""
        self.give_back(worker)
        self.settle(worker)
        self._leases.forget(worker)

    def transfer(self, old: int, new: int) -> None:
        """`new` takes the place of `old`: it gets what `old` held once more, in the same order,
        before all else.
        """
        self._leases.transfer(old, new)

    def state(self) -> dict[str, Any]:
        """All of it, JSON-ready; `restore` and `recover` are the ways back."""
        return {
            "spec": self.spec.as_dict(),
            "ended": self.ended,
            "dropped": self.dropped,
            "duplicates": self.duplicates,
            "here": sorted(
                worker for worker, loop in self._whereabouts.items() if loop == self.spec.loop
            ),
            "left_behind": [list(pair) for pair in self._left_behind.items()],
            **self._leases.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """What has counted, with the weights of the same version: leases are void."""
        self.ended, self.dropped, self.duplicates = (
            state["ended"],
            state["dropped"],
            state["duplicates"],
        )

    def recover(self, state: Mapping[str, Any]) -> None:
        """Be exactly the ledger whose state this is."""
        self.restore(state)
        self._leases = BatchLeases.recovered(state)
        self._left_behind = dict(state["left_behind"])
