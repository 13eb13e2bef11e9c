"""The data ledger of a loop over a stream: sources of unknown length.

Theory of operation. A lap is one pass over one source. One worker at a time reads a lap, and the
ledger deals it the lap's batches in order. A lap is:

    free -> read        a draw assigns it to a worker
    read -> free        its worker leaves or is lost, waits in a collective call, or gives back
                        the last leased batch
    read -> committed   its end is known, and every batch before the end is committed

The reader reports where the lap ends. This is a fact about the data, so it stays valid even if
the push that reported it does not count.

Invariant: under every policy a sample counts once. Batches of a lap are leased to one worker at a
time, and a lap changes its reader only together with its batches.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pscommon.core.data_stream import Spec, StreamSpec
from psserver.core.data.batch_leases import BatchPool
from psserver.core.data.loop import HasLeft, LoopLedger, never_left


class StreamLoop(LoopLedger):
    """The data ledger of one loop over a stream."""

    spec: StreamSpec

    def __init__(self, spec: StreamSpec, has_left: HasLeft = never_left) -> None:
        super().__init__(spec, has_left)
        self._laps = BatchPool(spec.laps)
        self._begun: dict[int, BatchPool] = {}
        self._readers: dict[int, int] = {}
        self._committed = 0

    @property
    def committed(self) -> int:
        return self._committed

    @property
    def done(self) -> bool:
        return self._laps.committed == self.spec.laps

    def extend(self, spec: Spec) -> None:
        super().extend(spec)
        self._laps.total = self.spec.laps

    def offset(self, lap: int) -> int:
        """Return the number of leading samples of a lap that have all counted."""
        return self._begun[lap].first_open * self.spec.batch_size if lap in self._begun else 0

    def ends(self, number: int, count: int) -> None:
        """Record that the lap ends in this batch, after `count` samples of it; 0: before the batch.

        The earliest end that any worker reported wins. Leases behind the end are void.
        """
        if not self.spec.laps:
            return  # a loop over no epochs has no batches
        lap, total = self.spec.lap(number), self.spec.lap_index(number) + (count > 0)
        pool = self._begun.get(lap)
        if pool is None or (pool.total is not None and pool.total <= total):
            return
        pool.end(total)
        for other, holder in self.leases.items():
            if self.spec.lap(other) == lap and self.spec.lap_index(other) >= total:
                self.leases.end(holder, other)
        self._end_if_done(lap)

    def _may_draw(self, worker: int) -> bool:
        return self._laps.peek() is not None or self._lap_at_hand(worker) is not None

    def _lap_at_hand(self, worker: int) -> int | None:
        """Return a lap that this worker reads and that has more batches, or None."""
        mine = (lap for lap, reader in self._readers.items() if reader == worker)
        return next((lap for lap in mine if self._begun[lap].peek() is not None), None)

    def _draw(self, workers: Sequence[int]) -> bool:
        dealt = False
        for worker in workers:
            lap = self._lap_at_hand(worker)
            if lap is None and self._laps.peek() is not None:
                lap = self._laps.take()
                self._readers[lap] = worker
                self._begun.setdefault(lap, BatchPool())
            if lap is not None:
                self.leases.deal(worker, self.spec.number(lap, self._begun[lap].take()))
                dealt = True
        return dealt

    def _count(self, number: int) -> None:
        lap = self.spec.lap(number)
        self._committed += 1
        self._begun[lap].commit(self.spec.lap_index(number))
        self._end_if_done(lap)

    def _end_if_done(self, lap: int) -> None:
        pool = self._begun[lap]
        if pool.total is not None and pool.first_open >= pool.total:
            del self._begun[lap]
            self._readers.pop(lap, None)
            self._laps.commit(lap)

    def _free(self, number: int) -> None:
        lap = self.spec.lap(number)
        self._begun[lap].put_back(self.spec.lap_index(number))
        if not any(self.spec.lap(other) == lap for other, _ in self.leases.items()):
            self._release(lap)

    def _release(self, lap: int) -> None:
        if self._readers.pop(lap, None) is not None:
            self._laps.put_back(lap)

    def rest(self, worker: int) -> None:
        """Let others read the laps of a worker that waits for them, except where it has batches."""
        self.give_back(worker, list(self.leases.ready(worker)))
        self._release_laps(worker, {self.spec.lap(n) for n in self.leases.leased_by(worker)})

    def _release_laps(self, worker: int, reading: Collection[int] = ()) -> None:
        """Let others read the laps of a worker except these."""
        for lap in [lap for lap, reader in self._readers.items() if reader == worker]:
            if lap not in reading:
                self._release(lap)

    def leave(self, worker: int) -> None:
        super().leave(worker)
        self._release_laps(worker)

    def lose(self, worker: int) -> None:
        super().lose(worker)
        self._release_laps(worker)

    def transfer(self, old: int, new: int) -> None:
        super().transfer(old, new)
        self._readers = {
            lap: new if reader == old else reader for lap, reader in self._readers.items()
        }

    def state(self) -> dict[str, Any]:
        return super().state() | {
            "committed": self._committed,
            "laps": self._laps.state(),
            "begun": [[lap, pool.total, pool.state()] for lap, pool in sorted(self._begun.items())],
            "readers": [list(pair) for pair in self._readers.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._committed = state["committed"]
        self._laps = BatchPool.restored(self.spec.laps, state["laps"])
        self._begun = {lap: BatchPool.restored(total, pool) for lap, total, pool in state["begun"]}

    def recover(self, state: Mapping[str, Any]) -> None:
        super().recover(state)
        self._laps = BatchPool.recovered(self.spec.laps, state["laps"])
        self._begun = {lap: BatchPool.recovered(total, pool) for lap, total, pool in state["begun"]}
        self._readers = dict(state["readers"])
