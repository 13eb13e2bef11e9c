"""Collectives: small values that the workers of a job combine.

Theory of operation. A call is named by the outermost training passes that its script has begun, and
by the calls since then; the calls of one name belong together. So a script that skips a finished
pass, with the calls in it, meets the calls of the others after it. A call is open from its first
contribution until no member is missing. A member is missing while it has made neither this call nor
a later one. Then the call has a result, which is kept.

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
from psserver.core.workers.members import Member
from psserver.core.workers.reported_values import json_number

MAX_RESULTS = 1024
NULL = "null"

NUMBERED = -1
"""In place of the passes: the call has only a number in its script. Clients without loaders make
such calls, and so did all scripts of earlier releases.
"""


class CallKey(NamedTuple):
    """The name of a call; keys are in the order of the script.

    Attributes:
        passes: Outermost training passes that the script had begun before it, or NUMBERED.
        number: Number of the call since then, from 1 on.
    """

    passes: int
    number: int

    def __str__(self) -> str:
        after = f" after training pass {self.passes}" if self.passes > 0 else ""
        return f"collective call {self.number}{after}"

    def as_json(self) -> Any:
        return self.number if self.passes == NUMBERED else list(self)

    @staticmethod
    def from_json(raw: Any) -> "CallKey":
        return CallKey(NUMBERED, raw) if isinstance(raw, int) else CallKey(*raw)


NO_CALL = CallKey(NUMBERED, 0)
"""Before all calls."""


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
        open: Contributions to calls without a result, by call and worker.
        results: Results by call; samples is 0.
        dropped: The newest call whose result is not kept any more; NO_CALL: none.
        newest: The newest call of each member that has made one.
        has_begun: Whether training has started, or --min-workers workers were members at the time
            of a call. No call has a result before.
    """

    def __init__(self) -> None:
        self.open: dict[CallKey, dict[int, CollectiveValues]] = {}
        self.results: OrderedDict[CallKey, CollectiveValues] = OrderedDict()
        self.dropped = NO_CALL
        self.newest: dict[int, CallKey] = {}
        self.has_begun = False

    def contribute(self, worker: int, key: CallKey, contribution: CollectiveValues) -> None:
        """Add a contribution; a repetition changes nothing.

        Raises MismatchError if other workers make another call with this name, InvalidRequestError
        if the result of this call is not kept any more.
        """
        self._check(key, contribution)
        self.newest[worker] = max(key, self.newest.get(worker, key))
        if key not in self.results:
            self.open.setdefault(key, {}).setdefault(worker, contribution)

    def _check(self, key: CallKey, contribution: CollectiveValues) -> None:
        known = self.results.get(key)
        if known is None and key <= self.dropped:
            raise InvalidRequestError(
                f"{key} failed: only the newest {MAX_RESULTS} results are kept. Try: "
                "fewer collectives, such as one for each pass",
                "OUT_OF_RANGE",
            )
        if known is None and key in self.open:
            known = next(iter(self.open[key].values()))
        if known is not None and (known.kind, known.names) != contribution[:2]:
            raise MismatchError(
                f"{key} failed: it is {contribution.describe()} on this worker and "
                f"{known.describe()} on others. Try: the same calls in the same order on all "
                "workers",
                "COLLECTIVE_MISMATCH",
            )

    def missing(self, key: CallKey, members: Sequence[Member]) -> list[Member]:
        """Return the members that have made neither this call nor a later one."""
        return [member for member in members if self.newest.get(member.worker, NO_CALL) < key]

    def drop_results(self, passes: int) -> None:
        """Drop the results made after this number of training passes had begun.

        The last of them gets more epochs, so the calls after it are made again.
        """
        for key in [key for key in self.results if key.passes >= passes]:
            del self.results[key]

    def is_waiting(self, worker: int) -> bool:
        """Return whether a call of this worker has no result yet."""
        return any(worker in contributions for contributions in self.open.values())

    def finish(self, members: Sequence[Member]) -> list[int]:
        """Give a result to each open call of which no member is missing.

        A broadcast needs only the members before the first one that passes a value. The members
        are in worker order. Returns the workers that have contributed to these calls.
        """
        served: list[int] = []
        for key in sorted(self.open) if self.has_begun else ():
            contributions = self.open[key]
            given = [contributions[m.worker] for m in members if m.worker in contributions]
            if given and not self.missing(key, self._needed(key, members)):
                self.results[key] = _combined(given)
                served += contributions
                del self.open[key]
        if served:
            self.results = OrderedDict(sorted(self.results.items()))
        while len(self.results) > MAX_RESULTS:
            self.dropped, _ = self.results.popitem(last=False)
        return served

    def _needed(self, key: CallKey, members: Sequence[Member]) -> Sequence[Member]:
        contributions = self.open[key]
        for index, member in enumerate(members):
            contribution = contributions.get(member.worker)
            if contribution is not None and contribution.text != NULL:
                return members[:index]
        return members

    def drop(self, worker: int) -> None:
        """Drop a departed member and its contributions to open calls."""
        self.newest.pop(worker, None)
        for key, contributions in list(self.open.items()):
            contributions.pop(worker, None)
            if not contributions:
                del self.open[key]

    def state(self) -> dict[str, Any]:
        """Return the state, JSON-ready; empty without calls. `recover` is the inverse."""
        if not (self.open or self.results or self.has_begun):
            return {}
        return {
            "collectives": {
                "open": [
                    [key.as_json(), worker, each.as_json()]
                    for key, contributions in self.open.items()
                    for worker, each in contributions.items()
                ],
                "results": [[key.as_json(), each.as_json()] for key, each in self.results.items()],
                "newest": [[worker, key.as_json()] for worker, key in self.newest.items()],
                "dropped": self.dropped.as_json(),
                "begun": self.has_begun,
            }
        }

    def recover(self, state: Mapping[str, Any]) -> None:
        """Load a `state` of the coordinator."""
        self.restore(state)
        found = state.get("collectives", {})
        for key, worker, raw in found.get("open", ()):
            calls = self.open.setdefault(CallKey.from_json(key), {})
            calls[worker] = CollectiveValues.from_json(raw)
        self.newest = {worker: CallKey.from_json(key) for worker, key in found.get("newest", ())}
        self.has_begun = found.get("begun", False)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load the results of a snapshot; its members are gone."""
        found = state.get("collectives", {})
        self.results = OrderedDict(
            (CallKey.from_json(key), CollectiveValues.from_json(raw))
            for key, raw in found.get("results", ())
        )
        self.dropped = CallKey.from_json(found.get("dropped", 0))


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
