"""Pushes that shards hold and that are not decided: ready once every shard has one."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pscommon.core.log import BatchKey, PushKey, Staged


class Pending:
    """By push, what each shard said of it. `ready` is in order of arrival."""

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._held: dict[PushKey, dict[int, Staged]] = {}
        self._ready: dict[PushKey, Staged] = {}

    @property
    def ready(self) -> Mapping[PushKey, Staged]:
        return self._ready

    def __contains__(self, key: PushKey) -> bool:
        return key in self._held

    def holds(self, shard: int, key: PushKey) -> bool:
        """Has this shard reported the push before?"""
        return shard in self._held.get(key, ())

    def staged(self, shard: int, staged: Staged) -> None:
        """A shard holds this push."""
        held = self._held.setdefault(staged.key, {})
        held[shard] = staged
        if len(held) == self._shards:
            self._ready.setdefault(staged.key, held[min(held)])

    def norm(self, key: PushKey) -> float:
        """Of the whole gradient: the root of the squares that the shards reported."""
        held = self._held[key]
        return math.sqrt(sum(held[shard].square_norm for shard in sorted(held)))

    def forget(self, key: PushKey) -> None:
        """It is decided."""
        self._held.pop(key, None)
        self._ready.pop(key, None)

    def drop(self, worker: int) -> None:
        """The worker is out, and what it pushed with it."""
        for key in [key for key in self._held if key.worker == worker]:
            self.forget(key)

    def shard_lost(self, shard: int) -> None:
        """A shard's process is new and holds nothing."""
        for key, held in self._held.items():
            if held.pop(shard, None) is not None:
                self._ready.pop(key, None)

    def state(self) -> dict[str, Any]:
        """JSON-ready; `recover` is the way back."""
        held = [[shard, _to_json(staged)] for parts in self._held.values() for shard, staged in parts.items()]
        return {"held": held, "ready": [list(key) for key in self._ready]}

    def recover(self, state: Mapping[str, Any]) -> None:
        for shard, staged in state["held"]:
            self.staged(shard, _from_json(staged))
        self._ready = {key: self._ready[key] for key in map(_key, state["ready"])}


def _key(pair: Iterable[int]) -> PushKey:
    return PushKey(*pair)


def _to_json(staged: Staged) -> list[Any]:
    batches = [list(batch) for batch in staged.batches]
    return [*staged.key, staged.samples, staged.base, batches, staged.problem, staged.square_norm, staged.mended]


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
