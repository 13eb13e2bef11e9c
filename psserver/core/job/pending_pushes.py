"""Pushes that shards hold and that are not decided: ready once every shard has one."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pscommon.core.log_entries import BatchKey, PushKey, Staged
from psserver.core.shard.clipping import Measurement


class PendingPushes:
    """By worker and seq, what each shard said of a push. `ready` is in order of arrival.

    A worker has one push under way at a time: with the next one it has given up those before it.
    measurement: what the shards were asked to measure of these pushes last; None once an update
    has counted.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._held: dict[int, dict[int, dict[int, Staged]]] = {}
        self._ready: dict[PushKey, Staged] = {}
        self.measurement: Measurement | None = None

    @property
    def ready(self) -> Mapping[PushKey, Staged]:
        return self._ready

    def holds(self, shard: int, key: PushKey) -> bool:
        """Has this shard reported the push before?"""
        return shard in self._held.get(key.worker, {}).get(key.seq, ())

    def staged(self, shard: int, staged: Staged) -> None:
        """A shard holds this push."""
        key = staged.key
        held = self._held.setdefault(key.worker, {}).setdefault(key.seq, {})
        held[shard] = staged
        if len(held) == self._shards:
            self._ready.setdefault(key, held[min(held)])

    def given_up(self) -> list[PushKey]:
        """Pushes that some shard lacks, and whose worker has gone on to another one: they may
        never be ready.
        """
        return [
            key
            for worker, pushes in self._held.items()
            if len(pushes) > 1
            for seq in sorted(pushes)[:-1]
            if (key := PushKey(worker, seq)) not in self._ready
        ]

    def norm(self, key: PushKey) -> float:
        """Of the whole gradient: the root of the squares that the shards reported."""
        return math.sqrt(self.square_norm(key))

    def square_norm(self, key: PushKey) -> float:
        """The sum of squares of the whole gradient, as the shards reported it with the push."""
        held = self._held[key.worker][key.seq]
        return sum(held[shard].square_norm for shard in sorted(held))

    def is_measured(self, key: PushKey) -> bool:
        """Did each shard report a sum of squares? 0 is also what one says that was not told yet
        to look at norms.
        """
        return all(staged.square_norm > 0 for staged in self._held[key.worker][key.seq].values())

    def forget(self, key: PushKey) -> None:
        """It is decided, and those that its worker gave up before it never will be."""
        pushes = self._held.pop(key.worker, {})
        for seq in [seq for seq in pushes if seq <= key.seq]:
            del pushes[seq]
            self._ready.pop(PushKey(key.worker, seq), None)
        if pushes:
            self._held[key.worker] = pushes

    def drop(self, worker: int) -> None:
        """The worker is out, and what it pushed with it."""
        for seq in self._held.pop(worker, {}):
            self._ready.pop(PushKey(worker, seq), None)

    def shard_lost(self, shard: int) -> None:
        """A shard's process is new and holds nothing."""
        for worker, pushes in self._held.items():
            for seq, held in pushes.items():
                if held.pop(shard, None) is not None:
                    self._ready.pop(PushKey(worker, seq), None)

    def state(self) -> dict[str, Any]:
        """JSON-ready; `recover` is the way back."""
        parts = (held for pushes in self._held.values() for held in pushes.values())
        held = [[shard, _to_json(staged)] for part in parts for shard, staged in part.items()]
        measurement = {} if self.measurement is None else {"measurement": self.measurement.state()}
        return {"held": held, "ready": [list(key) for key in self._ready], **measurement}

    def recover(self, state: Mapping[str, Any]) -> None:
        for shard, staged in state["held"]:
            self.staged(shard, _from_json(staged))
        self._ready = {key: self._ready[key] for key in map(_key, state["ready"])}
        self.measurement = (
            Measurement.from_state(state["measurement"]) if "measurement" in state else None
        )


def _key(pair: Iterable[int]) -> PushKey:
    return PushKey(*pair)


def _to_json(staged: Staged) -> list[Any]:
    batches = [list(batch) for batch in staged.batches]
    return [
        *staged.key,
        staged.samples,
        staged.base,
        batches,
        staged.problem,
        staged.square_norm,
        staged.mended,
    ]


def _from_json(values: list[Any]) -> Staged:
    worker, seq, samples, base, batches, *rest = values
    keys = tuple(BatchKey(*batch) for batch in batches)
    return Staged(PushKey(worker, seq), samples, base, keys, *rest)


def staged_to_json(staged: Iterable[Staged]) -> list[Any]:
    """A report's pushes, JSON-ready."""
    return [_to_json(each) for each in staged]


def staged_from_json(values: Iterable[list[Any]]) -> Iterator[Staged]:
    """The way back."""
    return (_from_json(each) for each in values)
