"""What a shard held when the model moved to another number of shards: it is read until all have
their new parts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pscommon.core.partition import ByteRange
from pscommon.optim.specs import Scalars, groups_to_json
from psserver.parameters.partition import raw
from psserver.parameters.store import ParameterStore


class FrozenDescription(NamedTuple):
    """What there is besides bytes: kinds of numbers ("weight", names of optimizer states), steps
    by tensor, groups, and what the optimizer keeps once for each tensor."""

    kinds: frozenset[str]
    steps: Mapping[int, int]
    groups_json: str
    scalars: Scalars


class FrozenBytes(NamedTuple):
    """Bytes of the tape from `start` on."""

    start: int
    data: memoryview


@dataclass(frozen=True)
class FrozenShard:
    """The numbers of a shard at the Reshard of this epoch and index, when there were so many
    shards. None change.
    """

    epoch: int
    index: int
    shards: int
    store: ParameterStore

    def about(self) -> FrozenDescription:
        kinds = frozenset(key.rpartition("@")[0] for key, _ in self.store.tensors())
        return FrozenDescription(
            kinds, self.store.steps(), groups_to_json(self.store.groups()), self.store.scalars()
        )

    def read(self, kind: str, span: ByteRange) -> Iterator[FrozenBytes]:
        """All that lies here of a stretch of one kind."""
        for key, tensor in self.store.tensors():
            found, _, place = key.rpartition("@")
            start, data = int(place), raw(tensor)
            low, high = max(start, span.start), min(start + data.nbytes, span.stop)
            if found == kind and low < high:
                yield FrozenBytes(low, data[low - start : high - start])
