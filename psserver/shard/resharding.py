"""A shard in a move to another number of shards: what it held is kept for others, its new part
is made of theirs.
"""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pscommon.core.errors import UnreachableError
from pscommon.core.partition import PartitionPlan
from psserver.durability.shard_log import HeldNumbers
from psserver.parameters.frozen_shard import FrozenShard
from psserver.shard.reshard_reader import PreviousShard, ReshardReader, needed_by

if TYPE_CHECKING:
    from psserver.shard.engine import ShardEngine


class ShardResharding:
    """The moves of one shard. changed: guards `held`, as all of the engine's; held: from before
    the last move, as long as anybody may need it."""

    def __init__(self, engine: "ShardEngine", changed: threading.Condition) -> None:
        self.held: FrozenShard | None = None
        self._engine = engine
        self._changed = changed

    @property
    def at(self) -> HeldNumbers | None:
        """Since when, for the log."""
        held = self.held
        return HeldNumbers(held.index, held.shards) if held is not None else None

    def frozen(self, epoch: int, index: int, seconds: float = 0.0) -> FrozenShard:
        """What was held here at the Reshard of this index. NOT_READY: not yet, or not any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._matching(epoch, index) is not None, seconds)
            found = self._matching(epoch, index)
        if found is None:
            text = f"shard {self._engine.shard} does not hold what it held at entry {index}"
            raise UnreachableError(text, "NOT_READY")
        return found

    def _matching(self, epoch: int, index: int) -> FrozenShard | None:
        held = self.held
        return held if held is not None and (held.epoch, held.index) == (epoch, index) else None

    def over(self) -> None:
        """Nothing is on the move: nobody needs what was held before."""
        if self.held is not None:
            with self._changed:
                self.held = None

    def move_in(self, index: int, sources: Sequence[PreviousShard]) -> None:
        """Make this shard's new part of what all shards held at the Reshard of this index.
        Repeating it is harmless.

        UnreachableError where one is not there, SnapshotError where something is missing.
        """
        room = self._engine.room_to_move(index)
        if room is None:
            return
        machine, spec, store = room
        store.restore(
            ReshardReader(
                PartitionPlan(spec, len(sources)), sources, needed_by(store.plan, machine.shard)
            )
        )
        self._engine.settle_in(machine, spec, store)
