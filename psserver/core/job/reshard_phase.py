"""A change of the number of shards, while workers wait.

Theory of operation. A Reshard entry is the point at which all shards stop. Staged pushes are void;
workers send them again. Each shard of the new partition builds its part from what the old shards
had at that entry, and reports it. Once all have, a snapshot with the new partition is written if
there is a data directory. Pushes count again only after that.

Invariant: at every moment a crash leaves either the old partition's snapshot and log, up to the
Reshard, or the new partition's snapshot.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ReshardPhase:
    """A reshard in progress.

    Attributes:
        before: Old number of shards.
        shards: New number of shards.
        index: Index of the Reshard entry.
        writes_snapshot: Whether it ends with a snapshot.
        loaded_shards: Shards that have their new part.
    """

    before: int
    shards: int
    index: int
    writes_snapshot: bool
    loaded_shards: set[int] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """Whether every shard has its new part."""
        return len(self.loaded_shards) == self.shards

    @property
    def members(self) -> int:
        """Number of shards that follow the log during the reshard, removed ones included."""
        return max(self.before, self.shards)

    def state(self) -> dict[str, Any]:
        """Return the phase as JSON values for `from_state`."""
        return {
            "before": self.before,
            "shards": self.shards,
            "index": self.index,
            "keeps": self.writes_snapshot,
            "moved": sorted(self.loaded_shards),
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> "ReshardPhase":
        return ReshardPhase(
            state["before"], state["shards"], state["index"], state["keeps"], set(state["moved"])
        )
