"""Observers of a shard: what the engine tells about pushes, updates and workers."""

from collections.abc import Sequence

from pscommon.core.log_entries import Apply, Reject
from psserver.durability.shard_state import ShardState


class ShardObserver:
    """Base class of observers; an observer overrides what concerns it.

    The engine calls each method while it changes the shard, so it must return at once.
    """

    def on_install(self, state: ShardState) -> None:
        """The shard's whole state was replaced."""

    def on_model(self, state: ShardState) -> None:
        """The shard has another partition of the model."""

    def on_receive(self, nbytes: int) -> None:
        """A push of `nbytes` bytes has been received."""

    def on_repeat(self) -> None:
        """A push was received again after it had been decided."""

    def on_update(
        self, entry: Apply, staged_at: Sequence[float], began: float, seconds: float
    ) -> None:
        """An update was applied.

        staged_at: when each of its pushes was complete, in monotonic seconds.
        began: when the update started, in monotonic seconds.
        seconds: duration of the update.
        """

    def on_reject(self, entry: Reject) -> None:
        """A push was refused."""

    def on_evict(self, worker: int) -> None:
        """A worker has left the job."""
