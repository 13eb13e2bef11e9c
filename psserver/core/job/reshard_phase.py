"""The model moves to another number of shards, while workers wait.

Theory of operation. A Reshard in the log is the point at which all shards stop: what is staged
is void, workers send it again. Each shard of the new layout makes its part from what the shards
of the old one held at that point, and says so. Once all have, a snapshot of the new layout is
cut where there is a data directory. Only when that is written do pushes count again: so whoever
dies has either the old layout's snapshot and log, up to the Reshard, or the new one's snapshot.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ReshardPhase:
    """From `before` shards to `shards`, at the Reshard of this index. moved: those that hold
    their new part.

    keeps: it ends with a snapshot.
    """

    before: int
    shards: int
    index: int
    keeps: bool
    moved: set[int] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """Does every shard hold its new part?"""
        return len(self.moved) == self.shards

    @property
    def members(self) -> int:
        """How many shards follow the log meanwhile: those that leave are read from."""
        return max(self.before, self.shards)

    def state(self) -> dict[str, Any]:
        """JSON-ready; `from_state` is the way back."""
        return {
            "before": self.before,
            "shards": self.shards,
            "index": self.index,
            "keeps": self.keeps,
            "moved": sorted(self.moved),
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> "ReshardPhase":
        return ReshardPhase(
            state["before"], state["shards"], state["index"], state["keeps"], set(state["moved"])
        )
