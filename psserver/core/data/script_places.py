"""Where each worker's script is, and so which loops it has left."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from pscommon.core.script_place import ScriptPlace, place_from_json
from psserver.core.data.loop import LoopLedger


class ScriptPlaces:
    """The newest place of each worker.

    A worker that names no loaders leaves its loops in the order of their numbers: its place is the
    number of the first one that it has not left.
    """

    def __init__(self) -> None:
        self._places: dict[int, ScriptPlace | int] = {}

    def move(self, worker: int, place: ScriptPlace | int) -> bool:
        """Record a worker's place; return whether it is another one."""
        if isinstance(place, ScriptPlace):
            place = replace(place, current=None, training_passes=0)
        is_other = self._places.get(worker) != place
        self._places[worker] = place
        return is_other

    def get(self, worker: int) -> ScriptPlace | int | None:
        return self._places.get(worker)

    def drop(self, worker: int) -> None:
        """Forget a departed worker."""
        self._places.pop(worker, None)

    def has_left(self, worker: int, loop: LoopLedger) -> bool:
        """Return whether a worker will not ask for batches of this loop any more."""
        place = self._places.get(worker)
        if isinstance(place, ScriptPlace):
            return loop.name is not None and place.has_left(loop.name)
        return place is not None and loop.spec.loop < place

    def first_open_workers(self) -> Mapping[int, list[int]]:
        """Return the workers whose place is a number, by this number, as loops store them."""
        found: dict[int, list[int]] = {}
        for worker, place in self._places.items():
            if isinstance(place, int):
                found.setdefault(place, []).append(worker)
        return {number: sorted(workers) for number, workers in found.items()}

    def as_json(self) -> dict[str, Any]:
        """Return the named places as JSON values for `recover`; empty without any."""
        places = [
            [worker, place.as_json()]
            for worker, place in self._places.items()
            if isinstance(place, ScriptPlace)
        ]
        return {"places": places} if places else {}

    def recover(
        self, states: Iterable[Mapping[str, Any]], places: Iterable[tuple[int, Any]]
    ) -> None:
        """Load the places from the states of all loops, and those of `as_json`."""
        self._places = {}
        for state in states:
            self._places |= dict.fromkeys(state["here"], state["spec"]["loop"])
        self._places |= {worker: place_from_json(place) for worker, place in places}
