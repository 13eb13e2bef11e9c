"""Where each worker's script is, and which loop of the job is which pass of its loader."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from pscommon.core.data_loop import LoopSpec
from pscommon.core.data_stream import Spec
from pscommon.core.script_place import PassName, ScriptPlace, place_from_json
from psserver.core.data.loop import LoopLedger
from psserver.core.data.resume_rules import only_epochs_differ


class ScriptPlaces:
    """The newest place of each worker.

    A worker that names no loaders leaves its loops in the order of their numbers: its place is the
    number of the first one that it has not left.

    Attributes:
        by_worker: The places; only `move`, `drop` and `recover` change them.
    """

    def __init__(self) -> None:
        self.by_worker: dict[int, ScriptPlace | int] = {}

    def move(self, worker: int, place: ScriptPlace | int) -> bool:
        """Record a worker's place; return whether it is another one."""
        if isinstance(place, ScriptPlace):
            place = replace(place, current=None, training_passes=0)
        is_other = self.by_worker.get(worker) != place
        self.by_worker[worker] = place
        return is_other

    def drop(self, worker: int) -> None:
        """Forget a departed worker."""
        self.by_worker.pop(worker, None)

    def has_left(self, worker: int, loop: LoopLedger) -> bool:
        """Return whether a worker will not ask for batches of this loop any more."""
        place = self.by_worker.get(worker)
        if isinstance(place, ScriptPlace):
            return loop.name is not None and place.has_left(loop.name)
        return place is not None and loop.spec.loop < place

    def first_open_workers(self) -> Mapping[int, list[int]]:
        """Return the workers whose place is a number, by this number, as loops store them."""
        found: dict[int, list[int]] = {}
        for worker, place in self.by_worker.items():
            if isinstance(place, int):
                found.setdefault(place, []).append(worker)
        return {number: sorted(workers) for number, workers in found.items()}

    def as_json(self) -> dict[str, Any]:
        """Return the named places as JSON values for `recover`; empty without any."""
        places = [
            [worker, place.as_json()]
            for worker, place in self.by_worker.items()
            if isinstance(place, ScriptPlace)
        ]
        return {"places": places} if places else {}

    def recover(
        self, states: Iterable[Mapping[str, Any]], places: Iterable[tuple[int, Any]]
    ) -> None:
        """Load the places from the states of all loops, and those of `as_json`."""
        self.by_worker = {}
        for state in states:
            self.by_worker |= dict.fromkeys(state["here"], state["spec"]["loop"])
        self.by_worker |= {worker: place_from_json(place) for worker, place in places}


class PassNumbers:
    """The numbers of named passes. The first worker that opens a pass gives it the next number.

    Loops that an earlier release has stored have no names. A pass takes the first equal one.

    Args:
        loops: The loops of the job, by number; their owner keeps them up to date.
    """

    def __init__(self, loops: Mapping[int, LoopLedger]) -> None:
        self._loops = loops
        self._numbers: dict[PassName, int] = {}
        self._unnamed: list[int] = []

    def add(self, loop: LoopLedger, name: PassName | None) -> None:
        """Add a loop that is stored under this name; None: it has none yet."""
        if name is not None:
            self.give(loop, name)
        elif not loop.is_numbered:
            self._unnamed.append(loop.spec.loop)

    def give(self, loop: LoopLedger, name: PassName) -> None:
        """Let a loop be the pass of this name."""
        loop.name = name
        self._numbers[name] = loop.spec.loop
        if loop.spec.loop in self._unnamed:
            self._unnamed.remove(loop.spec.loop)

    def find(self, spec: Spec, place: ScriptPlace | None, next_number: int) -> Spec:
        """Return the spec with the job's number, and the job's first epoch if the loop is known.

        next_number: The number of a new loop.
        """
        if place is None or place.current is None:
            return spec
        number = self._numbers.get(place.current)
        if number is None:
            number = self._find_unnamed(spec, next_number)
        loop = self._loops.get(number)
        if isinstance(spec, LoopSpec) and loop is not None and isinstance(loop.spec, LoopSpec):
            # loaders of equal data count their epochs together, so a first epoch depends on
            # when a script began the loader
            return replace(spec, loop=number, first_epoch=loop.spec.first_epoch)
        return replace(spec, loop=number)

    def _find_unnamed(self, spec: Spec, next_number: int) -> int:
        """Return the number of the loop without a name that a new pass is, or the next number.

        If the job has only other loops without a name, the script is another one: the ledger
        refuses the first of them.
        """
        specs = {number: self._loops[number].spec for number in self._unnamed}
        mine = {number: replace(spec, loop=number) for number in specs}
        equal = [number for number in specs if mine[number] == specs[number]]
        longer = [number for number in specs if only_epochs_differ(mine[number], specs[number])]
        other = [] if self._numbers else self._unnamed
        return next(iter([*equal, *longer, *other]), next_number)

    def begun(self) -> dict[str, tuple[int, list[int]]]:
        """By loader, return the number of passes that have begun, and those with open batches."""
        found: dict[str, tuple[int, list[int]]] = {}
        for name, number in self._numbers.items():
            count, still_open = found.get(name.loader, (0, []))
            loop = self._loops[number]
            if not (loop.ended or loop.done):
                still_open.append(name.number)
            found[name.loader] = max(count, name.number + 1), still_open
        return found
