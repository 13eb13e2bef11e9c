"""Collectives: small values that the workers of a job combine.

Theory of operation. Each script numbers its calls; the calls of one number belong together. A call
is open from its first contribution until no member is missing. A member is missing while it has
made neither this call nor a later one. Then the call has a result, which is kept.

Events: a worker contributes; a member departs, and its contributions to open calls are dropped.

Invariants:

- All contributions to a call have one kind and the same names.
- A result never changes. The newest MAX_RESULTS are kept, so a restarted worker repeats its calls
  and gets the same results.
- A result depends on the contributions, not on the order of their arrival: sums are made in worker
  order.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pscommon.core.errors import InvalidRequestError, MismatchError
from psserver.core.reports.finite import json_number
from psserver.core.workers.members import Member

MAX_RESULTS = 1024
NULL = "null"


class CollectiveValues(NamedTuple):
    """What one worker passes to a call.

    Attributes:
        kind: barrier, all_reduce or broadcast.
        names: Names of the values of an all_reduce, in order.
        values: One value for each name.
        samples: Weight of the values; 0: they do not count.
        text: JSON value of a broadcast.
    """

    kind: str
    names: tuple[str, ...] = ()
    values: tuple[float, ...] = ()
    samples: int = 1
    text: str = NULL

    def describe(self) -> str:
        return f"{self.kind} of {', '.join(self.names)}" if self.names else self.kind

    def as_json(self) -> list[Any]:
        values = [json_number(value) for value in self.values]
        return [self.kind, list(self.names), values, self.samples, self.text]

    @staticmethod
    def from_json(raw: Sequence[Any]) -> "CollectiveValues":
        kind, names, values, samples, text = raw
        return CollectiveValues(kind, tuple(names), tuple(map(float, values)), samples, text)


class Collectives:
    """The calls of all scripts.

    Attributes:
        open: Contributions to calls without a result, by number and worker.
        results: Results by number; samples is 0.
        dropped: The newest call whose result is not kept any more; 0: none.
        newest: The newest call of each member that has made one.
        has_begun: Whether training has started, or --min-workers workers were members at the time
            of a call. No call has a result before.
    """

    def __init__(self) -> None:
        self.open: dict[int, dict[int, CollectiveValues]] = {}
        self.results: OrderedDict[int, CollectiveValues] = OrderedDict()
        self.dropped = 0
        self.newest: dict[int, int] = {}
        self.has_begun = False

    def contribute(self, worker: int, number: int, contribution: CollectiveValues) -> None:
        """Add a contribution; a repetition changes nothing.

        Raises:
            MismatchError: Other workers make another call of this number.
            InvalidRequestError: The result of this call is not kept any more.
        """
        self._check(number, contribution)
        self.newest[worker] = max(number, self.newest.get(worker, 0))
        if number not in self.results:
            self.open.setdefault(number, {}).setdefault(worker, contribution)

    def _check(self, number: int, contribution: CollectiveValues) -> None:
        known = self.results.get(number)
        if known is None and number <= self.dropped:
            raise InvalidRequestError(
                f"collective {number} failed: only the newest {MAX_RESULTS} results are kept. Try: "
                "fewer collectives, such as one for each pass",
                "OUT_OF_RANGE",
            )
        if known is None and number in self.open:
            known = next(iter(self.open[number].values()))
        if known is not None and (known.kind, known.names) != contribution[:2]:
            raise MismatchError(
                f"collective {number} failed: it is {contribution.describe()} on this worker and "
                f"{known.describe()} on others. Try: the same calls in the same order on all "
                "workers",
                "COLLECTIVE_MISMATCH",
            )

    def missing(self, number: int, members: Sequence[Member]) -> list[Member]:
        """Return the members that have made neither this call nor a later one."""
        return [member for member in members if self.newest.get(member.worker, 0) < number]

    def is_waiting(self, worker: int) -> bool:
        """Return whether a call of this worker has no result yet."""
        return any(worker in contributions for contributions in self.open.values())

    def finish(self, members: Sequence[Member]) -> list[int]:
        """Give a result to each open call of which no member is missing.

        A broadcast needs only the members before the first one that passes a value.

        Args:
            members: The current members, in worker order.

        Returns:
            The workers that have contributed to these calls.
        """
        served: list[int] = []
        for number in sorted(self.open) if self.has_begun else ():
            contributions = self.open[number]
            given = [contributions[m.worker] for m in members if m.worker in contributions]
            if given and not self.missing(number, self._needed(number, members)):
                self.results[number] = _combined(given)
                served += contributions
                del self.open[number]
        if served:
            self.results = OrderedDict(sorted(self.results.items()))
        while len(self.results) > MAX_RESULTS:
            self.dropped, _ = self.results.popitem(last=False)
        return served

    def _needed(self, number: int, members: Sequence[Member]) -> Sequence[Member]:
        contributions = self.open[number]
        for index, member in enumerate(members):
            contribution = contributions.get(member.worker)
            if contribution is not None and contribution.text != NULL:
                return members[:index]
        return members

    def drop(self, worker: int) -> None:
        """Drop a departed member and its contributions to open calls."""
        self.newest.pop(worker, None)
        for number, contributions in list(self.open.items()):
            contributions.pop(worker, None)
            if not contributions:
                del self.open[number]

    def state(self) -> dict[str, Any]:
        """Return the state, JSON-ready; empty without calls. `recover` is the inverse."""
        if not (self.open or self.results or self.has_begun):
            return {}
        return {
            "collectives": {
                "open": [
                    [number, worker, each.as_json()]
                    for number, contributions in self.open.items()
                    for worker, each in contributions.items()
                ],
                "results": [[number, each.as_json()] for number, each in self.results.items()],
                "newest": [[worker, number] for worker, number in self.newest.items()],
                "dropped": self.dropped,
                "begun": self.has_begun,
            }
        }

    def recover(self, state: Mapping[str, Any]) -> None:
        """Load a `state` of the coordinator."""
        self.restore(state)
        found = state.get("collectives", {})
        for number, worker, raw in found.get("open", ()):
            self.open.setdefault(number, {})[worker] = CollectiveValues.from_json(raw)
        self.newest = dict(found.get("newest", ()))
        self.has_begun = found.get("begun", False)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load the results of a snapshot; its members are gone."""
        found = state.get("collectives", {})
        self.results = OrderedDict(
            (number, CollectiveValues.from_json(raw)) for number, raw in found.get("results", ())
        )
        self.dropped = found.get("dropped", 0)


def _combined(given: Sequence[CollectiveValues]) -> CollectiveValues:
    """Return the result of contributions in worker order."""
    first = given[0]
    counted = [each for each in given if each.samples > 0]
    total = sum(each.samples for each in counted)
    means = [
        sum(each.values[index] * (each.samples / total) for each in counted)
        if total
        else float("nan")
        for index in range(len(first.names))
    ]
    text = next((each.text for each in given if each.text != NULL), NULL)
    return CollectiveValues(first.kind, first.names, tuple(means), 0, text)
