"""The data ledger: all loops of the job, who is leased which data, and what has counted.

sync deals a whole draw at a time, one batch to every registered worker in worker order, when the
first of them asks: so who gets what is a pure function of the sequence and the membership, not of
who asks first. async and ssp deal to whoever asks, so faster workers take more.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pscommon.core.data_stream import Spec, StreamSpec, spec_from_dict
from pscommon.core.log_entries import BatchKey
from psserver.core.data.map_loop import MapLoop
from psserver.core.data.resume_rules import loop_mismatch, only_epochs_differ, why_not_extended
from psserver.core.data.stream_loop import StreamLoop


class DataLedger:
    """Loops by number. A push's batches are committed in the decision that counts it.

    What a push or a worker costs here does not grow with the loops that are over: a script may
    have one for each epoch. extendable: the job was resumed, and no worker has come to its last
    loop since: the first one may raise its epochs. origin: what the job was resumed from, in
    words for messages.
    """

    def __init__(self) -> None:
        self.extendable = False
        self.origin = ""
        self.loops: dict[int, MapLoop | StreamLoop] = {}
        self._resumed: frozenset[int] = frozenset()  # the loops that were there then
        self._last = -1  # the highest number of a loop
        self._live: dict[
            int, MapLoop | StreamLoop
        ] = {}  # but for those that were closed when a worker last came to a loop
        self._whereabouts: dict[int, int] = {}

    @property
    def open_loop(self) -> int:
        """Number of the first loop with data that has not counted, or that nobody has come to."""
        number = 0
        while (loop := self.loops.get(number)) and (loop.ended or loop.done):
            number += 1
        return number

    @property
    def known_loops(self) -> int:
        """The number after the highest one of a loop. Scripts may leave out numbers."""
        return self._last + 1

    @property
    def open_loops(self) -> list[int]:
        """Numbers of the loops with data that has not counted."""
        return [number for number, loop in self._live.items() if not (loop.ended or loop.done)]

    def live(self) -> Iterable[MapLoop | StreamLoop]:
        """Return the loops in which something may still count."""
        return self._live.values()

    def open(
        self, worker: int, spec: Spec, first_open: int | None = None, workers: Iterable[int] = ()
    ) -> MapLoop | StreamLoop:
        """The loop that a worker is at; MismatchError if the job knows it as another.
        first_open: it has left those before this one; None: those before the loop that it is at.
        workers: all that are registered."""
        if spec.loop not in self.loops:
            self._add(spec)
        loop = self.loops[spec.loop]
        is_last = spec.loop == self._last
        if loop.spec != spec:
            self._extend(loop, spec, is_last)
        self.extendable = self.extendable and not is_last
        here = spec.loop if first_open is None else min(first_open, spec.loop)
        if self._whereabouts.get(worker) != here:
            self._come(worker, here)
            self._end_left(workers)
        return loop

    def _extend(self, loop: MapLoop | StreamLoop, spec: Spec, is_last: bool) -> None:
        """Raise the epochs of a resumed loop. MismatchError if anything else differs or a later
        loop exists.
        """
        resumed = spec.loop in self._resumed
        reason, possible = "", resumed and only_epochs_differ(spec, loop.spec)
        if possible:
            reason = why_not_extended(
                spec, loop.spec, is_last, self.extendable, not loop.can_renumber
            )
        if reason or not possible:  # never by `origin`: a replay does not know it
            raise loop_mismatch(spec, loop.spec, self.origin if resumed else "", reason)
        loop.extend(spec)
        self._live[spec.loop] = loop

    def place(self, worker: int, loop: int) -> tuple[Any, ...]:
        """The first loop that the worker is still in, and what is dealt of this one."""
        return self._whereabouts.get(worker), self.loops[
            loop
        ].dealt() if loop in self.loops else None

    def _add(self, spec: Spec) -> MapLoop | StreamLoop:
        here = self._whereabouts
        loop = StreamLoop(spec, here) if isinstance(spec, StreamSpec) else MapLoop(spec, here)
        self.loops[spec.loop] = self._live[spec.loop] = loop
        self._last = max(self._last, spec.loop)
        return loop

    def _come(self, worker: int, loop: int) -> None:
        self._whereabouts[worker] = loop
        for number, earlier in self._live.items():
            if number < loop:
                earlier.leave(worker)

    def _end_left(self, workers: Iterable[int]) -> None:
        """Loops that all of these have left, broken off perhaps, are over: whoever comes to them
        later finds nothing there, instead of training alone on what the others did not want."""
        first = min((self._whereabouts.get(worker, 0) for worker in workers), default=0)
        for number, loop in self._live.items():
            if number < first:
                loop.end()
        self._live = {number: loop for number, loop in self._live.items() if not loop.closed}

    def commit(self, worker: int, batches: Iterable[BatchKey]) -> None:
        """The push that used these counts."""
        for loop, batch in self._known(batches):
            loop.commit(worker, batch.number)
        for loop in self._live.values():
            loop.settle(worker)

    def drop(self, worker: int, batches: Iterable[BatchKey]) -> None:
        """The push that used these will never count, and they are not to be dealt again."""
        for loop, batch in self._known(batches):
            loop.drop(worker, [batch.number])

    def use_up(self, worker: int, batches: Iterable[BatchKey]) -> None:
        """The worker has only evaluated these: no push will count them, and a loop of which all
        is done is over.
        """
        for loop, batch in self._known(batches):
            loop.drop(worker, [batch.number])
            if loop.done:
                loop.end()

    def put_back(self, worker: int, batches: Iterable[BatchKey]) -> None:
        """The worker will not push these; they are free again."""
        for loop, batch in self._known(batches):
            loop.give_back(worker, [batch.number])

    def _known(self, batches: Iterable[BatchKey]) -> list[tuple[MapLoop | StreamLoop, BatchKey]]:
        """With their loops; where a stream was found to end is noted."""
        known = [(self.loops[batch.loop], batch) for batch in batches if batch.loop in self.loops]
        for loop, batch in known:
            if batch.end and isinstance(loop, StreamLoop):
                loop.ends(batch.number, batch.count)
        return known

    def give_back(self, worker: int) -> None:
        """The worker is out of the job."""
        self._whereabouts.pop(worker, None)
        for loop in self._live.values():
            loop.lose(worker)

    def transfer(self, old: int, new: int) -> None:
        """Worker `new` takes the place of `old`, which is dead: it gets what `old` was leased
        and did not commit.
        """
        for loop in self._live.values():
            loop.transfer(old, new)

    def state(self) -> list[dict[str, Any]]:
        """All of it, JSON-ready."""
        return [loop.state() for loop in self.loops.values()]

    def restore(self, states: Iterable[Mapping[str, Any]]) -> None:
        """What has counted, with leases void: the job goes back to a snapshot, and all its
        workers are out.
        """
        self._whereabouts, self.loops, self._live, self._last = {}, {}, {}, -1
        for state in states:
            self._again(state).restore(state)
        self.resumes()

    def recover(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Be exactly the ledger whose state this is."""
        self._whereabouts = {worker: s["spec"]["loop"] for s in states for worker in s["here"]}
        self.loops, self._live, self._last = {}, {}, -1
        for state in states:
            self._again(state).recover(state)

    def resumes(self) -> None:
        """The job goes on from here with workers yet to come."""
        self._resumed, self.extendable = frozenset(self.loops), bool(self.loops)

    def _again(self, state: Mapping[str, Any]) -> MapLoop | StreamLoop:
        return self._add(spec_from_dict(state["spec"]))
