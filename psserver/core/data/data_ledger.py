"""The data ledger: the loops of the job, the leases of their batches, and committed batches.

Theory of operation. Each worker asks for batches of its current loop. A batch is free, leased or
committed (loop.py); the ledger moves batches between these states.

Events: a worker opens a loop, asks for batches, returns them, pushes, goes on to a later loop,
or departs; a push is applied or rejected.

Invariants:

- A batch is leased to at most one worker at a time, and committed in the decision that counts
  the push which used it.
- Under sync the first request deals a whole draw: one batch to every registered worker, in worker
  order. The assignment is a function of the sequence and the membership, not of the order of
  requests. Under async and ssp each request is served by itself, so faster workers get more.
- A loop that all workers have left ends, and a worker that reaches it later gets no batches.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pscommon.core.data_stream import Spec, StreamSpec, spec_from_dict
from pscommon.core.log_entries import BatchKey
from psserver.core.data.map_loop import MapLoop
from psserver.core.data.resume_rules import loop_mismatch, only_epochs_differ, why_not_extended
from psserver.core.data.stream_loop import StreamLoop


class DataLedger:
    """All loops of the job.

    The cost of a request does not grow with ended loops: a script may have one for each epoch.

    Attributes:
        loops: Loops by number.
        news: Grows when batches may have become free, or a loop has ended or got more epochs:
            workers that wait for data then ask again.
        extendable: Whether the first worker to reach the last loop may raise its epochs: the job
            was resumed, and no worker has reached that loop since.
        origin: What the job was resumed from, for messages.
    """

    def __init__(self) -> None:
        self.extendable = False
        self.origin = ""
        self.news = 0
        self.loops: dict[int, MapLoop | StreamLoop] = {}
        self._resumed: frozenset[int] = frozenset()  # the loops that were there then
        self._last = -1  # the highest number of a loop
        # without the ended and idle loops of the time when a worker last reached a loop
        self._live: dict[int, MapLoop | StreamLoop] = {}
        self._first_open_loops: dict[int, int] = {}

    @property
    def open_loop(self) -> int:
        """Number of the first loop that has uncommitted batches or that no worker has reached."""
        number = 0
        while (loop := self.loops.get(number)) and (loop.ended or loop.done):
            number += 1
        return number

    @property
    def known_loops(self) -> int:
        """One more than the highest number of a loop. Scripts may skip numbers."""
        return self._last + 1

    @property
    def open_loops(self) -> list[int]:
        """Numbers of the loops with uncommitted batches."""
        return [number for number, loop in self._live.items() if not (loop.ended or loop.done)]

    def live(self) -> Iterable[MapLoop | StreamLoop]:
        """Return the loops in which a batch may still be committed."""
        return self._live.values()

    def open(
        self, worker: int, spec: Spec, first_open: int | None = None, workers: Iterable[int] = ()
    ) -> MapLoop | StreamLoop:
        """Return the loop that a worker has reached.

        Args:
            worker: The worker.
            spec: Its description of the loop.
            first_open: The first loop that the worker has not left; None: this one.
            workers: All registered workers.

        Raises:
            MismatchError: The job has another loop of this number.
        """
        if spec.loop not in self.loops:
            self._add(spec)
        loop = self.loops[spec.loop]
        is_last = spec.loop == self._last
        if loop.spec != spec:
            self._extend(loop, spec, is_last)
        self.extendable = self.extendable and not is_last
        here = spec.loop if first_open is None else min(first_open, spec.loop)
        if self._first_open_loops.get(worker) != here:
            self._come(worker, here)
            self._end_left(here, workers)
        return loop

    def leave_loops(self, worker: int, first_open: int, workers: Iterable[int]) -> None:
        """Record that a worker has left the loops before `first_open`, without opening one.

        Args:
            worker: The worker.
            first_open: The first loop that it has not left.
            workers: All registered workers.
        """
        if first_open > self._first_open_loops.get(worker, first_open):
            self._come(worker, first_open)
            self._end_left(first_open, workers)

    def _extend(self, loop: MapLoop | StreamLoop, spec: Spec, is_last: bool) -> None:
        """Raise the epochs of a resumed loop. MismatchError if anything else differs or a later
        loop exists.
        """
        resumed = spec.loop in self._resumed
        reason, possible = "", resumed and only_epochs_differ(spec, loop.spec)
        if possible:
            is_outstanding = isinstance(loop, StreamLoop) and not loop.is_idle
            reason = why_not_extended(spec, loop.spec, is_last, self.extendable, is_outstanding)
        if reason or not possible:  # must not depend on `origin`, which a replay lacks
            raise loop_mismatch(spec, loop.spec, self.origin if resumed else "", reason)
        loop.extend(spec)
        self.news += 1
        self._live[spec.loop] = loop

    def place(self, worker: int, loop: int) -> tuple[Any, ...]:
        """Return the first loop that the worker has not left, and what is dealt of this one."""
        return self._first_open_loops.get(worker), self.loops[
            loop
        ].dealt() if loop in self.loops else None

    def _add(self, spec: Spec) -> MapLoop | StreamLoop:
        here = self._first_open_loops
        loop = StreamLoop(spec, here) if isinstance(spec, StreamSpec) else MapLoop(spec, here)
        self.loops[spec.loop] = self._live[spec.loop] = loop
        self._last = max(self._last, spec.loop)
        return loop

    def _come(self, worker: int, loop: int) -> None:
        self._first_open_loops[worker] = loop
        for number, earlier in self._live.items():
            if number < loop:
                earlier.leave(worker)
                self.news += 1

    def _end_left(self, before: int, workers: Iterable[int]) -> None:
        """End loops before this one that all workers have left.

        A later worker does not train on them alone.
        """
        if all(number >= before for number in self._live):
            return  # without a search in the workers: each of them comes here once for each loop
        first = min((self._first_open_loops.get(worker, 0) for worker in workers), default=0)
        for number, loop in self._live.items():
            if number < first:
                loop.end()
                self.news += 1
        self._live = {
            number: loop for number, loop in self._live.items() if not (loop.ended and loop.is_idle)
        }

    def commit(self, worker: int, batches: Iterable[BatchKey]) -> None:
        """Commit the batches of a push that counts."""
        for loop, batch in self._known(batches):
            loop.commit(worker, batch.number)
        for loop in self._live.values():
            loop.settle(worker)

    def drop(self, worker: int, batches: Iterable[BatchKey]) -> None:
        """Commit the batches of a push that will not count; they are not dealt again."""
        for loop, batch in self._known(batches):
            loop.drop(worker, [batch.number])

    def use_up(self, worker: int, batches: Iterable[BatchKey]) -> None:
        """Commit batches that a worker only evaluated, and end a loop that is then done."""
        for loop, batch in self._known(batches):
            loop.drop(worker, [batch.number])
            if loop.done:
                loop.end()
                self.news += 1

    def put_back(self, worker: int, batches: Iterable[BatchKey]) -> None:
        """Free batches that a worker will not push."""
        self.news += 1
        for loop, batch in self._known(batches):
            loop.give_back(worker, [batch.number])

    def _known(self, batches: Iterable[BatchKey]) -> list[tuple[MapLoop | StreamLoop, BatchKey]]:
        """Return the batches with their loops, and note ends of streams."""
        known = [(self.loops[batch.loop], batch) for batch in batches if batch.loop in self.loops]
        for loop, batch in known:
            if batch.end and isinstance(loop, StreamLoop):
                loop.ends(batch.number, batch.count)
        return known

    def give_back(self, worker: int) -> None:
        """Free all batches of a departed worker."""
        self.news += 1
        self._first_open_loops.pop(worker, None)
        for loop in self._live.values():
            loop.lose(worker)

    def transfer(self, old: int, new: int) -> None:
        """Give the leases of a dead worker to the one that replaces it."""
        for loop in self._live.values():
            loop.transfer(old, new)

    def state(self) -> list[dict[str, Any]]:
        """Return all loops as JSON values for `restore` and `recover`."""
        return [loop.state() for loop in self.loops.values()]

    def restore(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Load the committed batches of a snapshot; leases are void."""
        self._first_open_loops, self.loops, self._live, self._last = {}, {}, {}, -1
        for state in states:
            self._again(state).restore(state)
        self.resumes()

    def recover(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load a complete state, leases included."""
        self._first_open_loops = {worker: s["spec"]["loop"] for s in states for worker in s["here"]}
        self.loops, self._live, self._last = {}, {}, -1
        for state in states:
            self._again(state).recover(state)

    def resumes(self) -> None:
        """Note that the job is resumed: its last loop may get more epochs."""
        self._resumed, self.extendable = frozenset(self.loops), bool(self.loops)

    def _again(self, state: Mapping[str, Any]) -> MapLoop | StreamLoop:
        return self._add(spec_from_dict(state["spec"]))
