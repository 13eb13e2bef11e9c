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
- A loop is a pass of a loader. The first worker that opens a pass gives it the next number, so
  workers may open their passes in different orders. The passes of a `Client` that names no loader
  have the numbers that it chooses, and it leaves them in the order of their numbers.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pscommon.core.data_stream import Spec, StreamSpec, spec_from_dict
from pscommon.core.log_entries import BatchKey
from pscommon.core.script_place import PassName, ScriptPlace
from psserver.core.data.map_loop import MapLoop
from psserver.core.data.resume_rules import loop_mismatch, only_epochs_differ, why_not_extended
from psserver.core.data.script_places import PassNumbers, ScriptPlaces
from psserver.core.data.stream_loop import StreamLoop


class DataLedger:
    """All loops of the job.

    The cost of a request does not grow with ended loops: a script may have one for each epoch.

    Attributes:
        loops: Loops by number.
        live: The loops in which a batch may still be committed, by number, and some that have ended
            since a worker last reached a loop.
        news: Grows when batches may have become free, or a loop has ended or got more epochs:
            workers that wait for data then ask again.
        extendable: Whether the first worker to reach the last loop may raise its epochs: the job
            was resumed, and no worker has reached that loop since.
        origin: What the job was resumed from, for messages.
        extensions: Number of times that a loop got more epochs.
        passes: Which loop is which pass.
        places: Where the workers' scripts are.
    """

    def __init__(self) -> None:
        self.extendable = False
        self.origin = ""
        self.news = self.extensions = 0
        self.loops: dict[int, MapLoop | StreamLoop] = {}
        self._resumed: frozenset[int] = frozenset()  # the loops that were there then
        self._last = -1  # the highest number of a loop
        self.live: dict[int, MapLoop | StreamLoop] = {}
        self.places = ScriptPlaces()
        self.passes = PassNumbers(self.loops)

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
        return [number for number, loop in self.live.items() if not (loop.ended or loop.done)]

    def open(
        self,
        worker: int,
        spec: Spec,
        place: ScriptPlace | int | None = None,
        workers: Iterable[int] = (),
    ) -> MapLoop | StreamLoop:
        """Return the loop that a worker has reached.

        Args:
            spec: Its description of the loop, as `passes.find` returns it.
            place: Where its script is, or the first numbered loop that it has not left; None: this
                one.
            workers: All registered workers.

        Raises MismatchError if the job has another loop of this number.
        """
        name = place.current if isinstance(place, ScriptPlace) else None
        if spec.loop not in self.loops:
            loop = self._add(spec)
            loop.is_numbered = name is None
        loop = self.loops[spec.loop]
        is_last = spec.loop == self._last
        if loop.spec != spec:
            self._extend(loop, spec, name, is_last)
        self.extendable = self.extendable and not is_last
        if name is not None and loop.name is None:
            self.passes.give(loop, name)
        if not isinstance(place, ScriptPlace):
            place = spec.loop if place is None else min(place, spec.loop)
        self._move(worker, place, workers)
        return loop

    def leave_loops(self, worker: int, place: ScriptPlace | int, workers: Iterable[int]) -> None:
        """Record that a worker has left loops, without opening one. Arguments as in `open`."""
        before = self.places.by_worker.get(worker)
        if isinstance(place, ScriptPlace) or (isinstance(before, int) and place > before):
            self._move(worker, place, workers)

    def _move(self, worker: int, place: ScriptPlace | int, workers: Iterable[int]) -> None:
        if self.places.move(worker, place):
            for loop in self.live.values():
                if self.places.has_left(worker, loop):
                    loop.leave(worker)
                    self.news += 1
            self._end_left(worker, workers)

    def _extend(
        self, loop: MapLoop | StreamLoop, spec: Spec, name: PassName | None, is_last: bool
    ) -> None:
        """Raise the epochs of a resumed loop. MismatchError if anything else differs or a later
        loop exists.
        """
        resumed = spec.loop in self._resumed
        reason, possible = "", resumed and only_epochs_differ(spec, loop.spec)
        if possible:
            is_outstanding = isinstance(loop, StreamLoop) and not loop.is_idle
            reason = why_not_extended(spec, loop.spec, is_last, self.extendable, is_outstanding)
        if reason or not possible:  # must not depend on `origin`, which a replay lacks
            origin = self.origin if resumed else ""
            raise loop_mismatch(spec, loop.spec, loop.name or name, origin, reason)
        loop.extend(spec)
        self.news += 1
        self.extensions += 1
        self.live[spec.loop] = loop

    def place(self, worker: int, loop: int) -> tuple[Any, ...]:
        """Return which loops the worker has left, and what is dealt of this one."""
        dealt = self.loops[loop].dealt() if loop in self.loops else None
        return self.places.by_worker.get(worker), dealt

    def _add(self, spec: Spec) -> MapLoop | StreamLoop:
        has_left = self.places.has_left
        loop = (
            StreamLoop(spec, has_left) if isinstance(spec, StreamSpec) else MapLoop(spec, has_left)
        )
        self.loops[spec.loop] = self.live[spec.loop] = loop
        self._last = max(self._last, spec.loop)
        return loop

    def _end_left(self, worker: int, workers: Iterable[int]) -> None:
        """End the loops that all workers have left.

        A later worker does not train on them alone.
        """
        left = [loop for loop in self.live.values() if self.places.has_left(worker, loop)]
        if not left:
            return  # without a search in the workers: each of them comes here once for each loop
        others = list(workers)
        for loop in left:
            if others and all(self.places.has_left(other, loop) for other in others):
                loop.end()
                self.news += 1
        self.live = {
            number: loop for number, loop in self.live.items() if not (loop.ended and loop.is_idle)
        }

    def commit(self, worker: int, batches: Sequence[BatchKey]) -> None:
        """Commit the batches of a push that counts."""
        for loop, batch in self._known(batches) if batches else ():
            loop.commit(worker, batch.number)
        for loop in self.live.values():
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
        self.places.drop(worker)
        for loop in self.live.values():
            loop.lose(worker)

    def transfer(self, old: int, new: int) -> None:
        """Give the leases of a dead worker to the one that replaces it."""
        for loop in self.live.values():
            loop.transfer(old, new)

    def state(self) -> list[dict[str, Any]]:
        """Return all loops as JSON values for `restore` and `recover`."""
        here = self.places.first_open_workers()
        return [
            loop.state() | {"here": here.get(number, [])} for number, loop in self.loops.items()
        ]

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the committed batches of a snapshot; leases are void."""
        self._load(states)
        for state in states:
            self.loops[state["spec"]["loop"]].restore(state)
        self.resumes()

    def recover(
        self, states: Sequence[Mapping[str, Any]], places: Iterable[tuple[int, Any]] = ()
    ) -> None:
        """Load a complete state, leases included."""
        self._load(states)
        for state in states:
            self.loops[state["spec"]["loop"]].recover(state)
        self.places.recover(states, places)

    def resumes(self) -> None:
        """Note that the job is resumed: its last loop may get more epochs."""
        self._resumed, self.extendable = frozenset(self.loops), bool(self.loops)

    def _load(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Replace all loops by those of the states, without their batches."""
        self.places, self.loops, self.live, self._last = ScriptPlaces(), {}, {}, -1
        self.passes = PassNumbers(self.loops)
        for state in states:
            name = state.get("name")
            loop = self._add(spec_from_dict(state["spec"]))
            loop.is_numbered = state.get("numbered", False)
            self.passes.add(loop, PassName(*name) if name is not None else None)
