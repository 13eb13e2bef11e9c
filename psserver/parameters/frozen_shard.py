"""A shard's partition from before a reshard; other shards read it to build their new ones.

`ShardState.freeze` makes it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pscommon.core.partition import ByteRange
from pscommon.optim.specs import Scalars, groups_to_json
from pscommon.parameters.partition import raw
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
    """A shard's arrays at the Reshard entry with this log id and index. They no longer change.

    shards: number of shards before the reshard.
    """

    log_id: int
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
