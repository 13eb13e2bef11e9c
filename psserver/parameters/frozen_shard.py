"""A shard's partition from before a reshard; other shards read it to build their new ones."""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pscommon.core.errors import UnreachableError
from pscommon.core.partition import ByteRange
from pscommon.optim.specs import Scalars, groups_to_json
from psserver.parameters.partition import raw
from psserver.parameters.store import ParameterStore


class FrozenDescription(NamedTuple):
    """What a partition has besides its bytes.

    kinds: "weight" and the names of optimizer states.
    steps: optimizer steps by tensor.
    groups_json: hyper-parameters of the groups.
    scalars: optimizer values kept once per tensor.
    """

    kinds: frozenset[str]
    steps: Mapping[int, int]
    groups_json: str
    scalars: Scalars


class FrozenBytes(NamedTuple):
    """Bytes of the flat buffer from `start` on."""

    start: int
    data: memoryview


@dataclass(frozen=True)
class FrozenShard:
    """A shard's arrays at the Reshard entry with this epoch and index. They no longer change.

    shards: number of shards before the reshard.
    """

    epoch: int
    index: int
    shards: int
    store: ParameterStore

    def describe(self) -> FrozenDescription:
        kinds = frozenset(key.rpartition("@")[0] for key, _ in self.store.tensors())
        return FrozenDescription(
            kinds, self.store.steps(), groups_to_json(self.store.groups()), self.store.scalars()
        )

    def read(self, kind: str, span: ByteRange) -> Iterator[FrozenBytes]:
        """Yield this shard's bytes of one kind within `span`."""
        for key, tensor in self.store.tensors():
            found_kind, _, position = key.rpartition("@")
            start, data = int(position), raw(tensor)
            low, high = max(start, span.start), min(start + data.nbytes, span.stop)
            if found_kind == kind and low < high:
                yield FrozenBytes(low, data[low - start : high - start])


class FrozenShardHolder:
    """Keeps a shard's frozen partition until no other shard needs it.

    changed: the condition that guards `current` and is notified when it changes.
    current: the partition before the last reshard; None if there was none or it is discarded.
    """

    def __init__(self, shard: int, changed: threading.Condition) -> None:
        self.current: FrozenShard | None = None
        self._shard = shard
        self._changed = changed

    def wait_for(self, epoch: int, index: int, seconds: float = 0.0) -> FrozenShard:
        """Return the partition frozen at this Reshard entry.

        Raises UnreachableError (NOT_READY) if it is not frozen within `seconds`, or is discarded.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._find(epoch, index) is not None, seconds)
            found = self._find(epoch, index)
        if found is None:
            text = f"shard {self._shard} has no partition frozen at entry {index}"
            raise UnreachableError(text, "NOT_READY")
        return found

    def _find(self, epoch: int, index: int) -> FrozenShard | None:
        current = self.current
        matches = current is not None and (current.epoch, current.index) == (epoch, index)
        return current if matches else None

    def discard(self) -> None:
        """Drop the partition: no reshard is in progress."""
        if self.current is not None:
            with self._changed:
                self.current = None
