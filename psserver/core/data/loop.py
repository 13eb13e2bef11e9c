"""The data ledger of one loop: which worker leases which batch, and which batches have counted.

Theory of operation. A batch is a number; a pure function of the loop's spec maps the number to
samples. A batch is free, leased to a worker, or committed:

    free -> leased        a draw deals it to a worker
    leased -> committed   the push that used it counts (same log entry), or its worker drops it
    leased -> free        its worker is lost or gives it back

A committed batch never becomes free again, except by a rollback. Subclasses decide which batches
are free and which worker gets the next one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pscommon.core.data_stream import Spec
from pscommon.core.script_place import PassName
from psserver.core.data.batch_leases import BatchLeases

HasLeft = Callable[[int, "LoopLedger"], bool]


def never_left(worker: int, loop: "LoopLedger") -> bool:
    """Return that no worker has left the loop."""
    return False


class LoopLedger(ABC):
    """The data ledger of one loop.

    spec: the loop.
    name: the pass that it is; None: it has a number only.
    is_numbered: a client chose its number, so no pass will be this loop. False also for loops that
        an earlier release has stored without a name.
    ended: no worker gets more batches of it.
    was_left: in this process's time a worker has completed its part, or gone on to a later pass.
    dropped: batches that scripts discarded; they are committed.
    duplicates: batches in counted pushes whose worker no longer leased them. Their samples also
        count in another push.
    leases: the batches that workers lease.
    units: batches that one draw deals under --global-batch; None: one to each worker.

    has_left: returns whether a worker has left the loop.
    """

    def __init__(self, spec: Spec, has_left: HasLeft = never_left) -> None:
        self.spec = spec
        self.name: PassName | None = None
        self.is_numbered = self.ended = self.was_left = False
        self.dropped = 0
        self.duplicates = 0
        self.units: int | None = None
        self._has_left = has_left
        self.leases = BatchLeases()
        self._left_behind: dict[int, int] = {}

    @property
    @abstractmethod
    def committed(self) -> int:
        """Batches that have counted or were dropped."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether every batch is committed."""

    @property
    def is_idle(self) -> bool:
        """Whether no worker has a batch of this loop that may still count."""
        return not self.leases and not self._left_behind

    def end(self) -> None:
        """Stop dealing batches. What was sent is not sent again."""
        self.ended = True
        if not self.leases:
            self.leases = BatchLeases()

    def extend(self, spec: Spec) -> None:
        """Continue the loop with more epochs; it is no longer ended."""
        self.spec, self.ended = spec, False

    def dealt(self) -> tuple[Any, ...]:
        """Return a value that changes with every deal, send, acknowledgement and commit."""
        return self.ended, self.committed, self.leases.revision

    def has_dealt(self, worker: int) -> bool:
        """Return whether a dealt batch is ready and this worker may fetch it now."""
        return bool(self.leases.ready(worker))

    def take(self, worker: int, received: int, count: int, together: Iterable[int]) -> list[int]:
        """Return up to `count` batches for a worker.

        Batches that were sent after the first `received` are sent again first.

        Args:
            received: Number of batches of this loop that the worker has received so far.
            together: The workers that a draw deals to, in order. Read only for a draw, because its
                cost grows with the workers.
        """
        if again := self.leases.again(worker, received):
            return again
        here: list[int] = []
        while len(self.leases.ready(worker)) < count and self._may_draw(worker):
            here = here or [other for other in together if not self._has_left(other, self)]
            if not self._draw(here):
                break
        numbers: list[int] = []
        while len(numbers) < count and self.has_dealt(worker):
            numbers.append(self.leases.send(worker, received + len(numbers)))
        return numbers

    def following(self, worker: int, numbers: Iterable[int]) -> list[int]:
        """Return for each of a worker's batches how many later ones belong to the same push.

        An empty list means that the batches are independent.
        """
        return []

    @abstractmethod
    def _may_draw(self, worker: int) -> bool:
        """Return whether a worker with no ready batch may trigger a draw of a free batch."""

    @abstractmethod
    def _draw(self, workers: Sequence[int]) -> bool:
        """Deal batches to these workers. Return False if there is nothing to deal."""

    @abstractmethod
    def _count(self, number: int) -> None:
        """Commit a batch that was leased."""

    @abstractmethod
    def _free(self, number: int) -> None:
        """Free a batch that was leased."""

    def commit(self, worker: int, number: int) -> bool:
        """Commit a batch, because the push that used it counts.

        Return False for a duplicate: the worker did not lease the batch.
        """
        if self.leases.end(worker, number):
            self._count(number)
            return True
        if self._left_behind.get(number) == worker:
            del self._left_behind[number]
            self.dropped -= 1
            return True
        self.duplicates += 1
        return False

    def drop(self, worker: int, numbers: Iterable[int] | None = None) -> None:
        """Commit these batches (None: all) of a worker without a push; they are not dealt again."""
        for number in self.leases.leased_by(worker, numbers):
            self.commit(worker, number)
            self.dropped += 1

    def leave(self, worker: int) -> None:
        """Record that the worker went on to a later loop.

        Batches that it received are dropped, unless its next push uses them. Batches that were not
        sent become free.
        """
        self.was_left = True
        self.give_back(worker, list(self.leases.ready(worker)))
        leased = self.leases.leased_by(worker)
        self.drop(worker)
        self._left_behind.update(dict.fromkeys(leased, worker))

    def settle(self, worker: int) -> None:
        """Keep what this worker left behind dropped for good, because a push of it has counted."""
        if self._left_behind:
            self._left_behind = {
                n: holder for n, holder in self._left_behind.items() if holder != worker
            }

    def give_back(self, worker: int, numbers: Iterable[int] | None = None) -> None:
        """Free these batches (None: all) of a worker."""
        for number in self.leases.leased_by(worker, numbers):
            self.leases.end(worker, number)
            self._free(number)

    def lose(self, worker: int) -> None:
        """Free all batches of a worker that is no longer a member."""
        self.give_back(worker)
        self.settle(worker)
        self.leases.forget(worker)

    def transfer(self, old: int, new: int) -> None:
        """Move all batches of `old` to its replacement `new`.

        They are sent to `new` in the same order, before any other batch.
        """
        self.leases.transfer(old, new)

    def state(self) -> dict[str, Any]:
        """Return the state, JSON-ready; `restore` and `recover` are the inverses."""
        return {
            "spec": self.spec.as_dict(),
            **({"name": list(self.name)} if self.name is not None else {}),
            **({"numbered": True} if self.is_numbered else {}),
            "ended": self.ended,
            "dropped": self.dropped,
            "duplicates": self.duplicates,
            "here": [],  # DataLedger sets it, here for the order of the keys on disk
            "left_behind": [list(pair) for pair in self._left_behind.items()],
            **self.leases.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what has counted, as a rollback to a snapshot does: leases are void."""
        self.ended, self.dropped = state["ended"], state["dropped"]
        self.duplicates = state["duplicates"]

    def recover(self, state: Mapping[str, Any]) -> None:
        """Restore the exact ledger, leases included."""
        self.restore(state)
        self.leases = BatchLeases.recovered(state)
        self._left_behind = dict(state["left_behind"])
