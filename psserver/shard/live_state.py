"""A shard's state while threads use it: its locks, and the threads that wait for a change.

`changed` guards the state machine; it is never held while arrays are computed. `changes` wakes what
waits for it. `apply_lock` lets one thread at a time change arrays. `log_lock` lets one thread at a
time log and stage a push, or begin a log segment. A thread takes them in the order apply_lock,
log_lock, changed.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Never

from pscommon.core.errors import LayoutError, UnreachableError
from pscommon.core.log_entries import Apply, Entry, Evict, Measure, PushKey, Reject, SetBuffers
from psserver.core.shard.state_machine import ShardMachine
from psserver.durability.shard_state import ShardState
from psserver.durability.state_records import StateRecord, shard_records
from psserver.parameters.frozen_shard import FrozenShard
from psserver.parameters.store import ParameterStore
from psserver.waiting import Registrations, ThreadWaiter, run, until


class Changes(Registrations[PushKey | None]):
    """What waits for a change of a shard's state.

    With many workers in async, waking all of them at every update would cost too much. So a wait
    may be for one push alone: its key. The key None is that of any change.
    """

    def notify_all(self) -> None:
        """Wake everything: any part of the state may have changed."""
        self.wake(self.keys)

    def notify_entry(self, entry: Entry) -> None:
        """Wake what waits for the entry's pushes, and what waits for any change."""
        keys: list[PushKey | None]
        match entry:
            case Apply():
                keys = [contribution.key for contribution in entry.contributions]
            case Measure():
                return  # nothing has become of its pushes yet
            case Reject() | SetBuffers():
                keys = [entry.key]
            case Evict():
                keys = [key for key in self.keys if key and key.worker == entry.worker]
            case _:
                keys = [key for key in self.keys if key]
        self.wake([None, *keys])


class LiveShardState:
    """The state of a running shard. All methods may be called from any thread.

    state: the current state; only the engine replaces it.
    stop_reason: why the shard stops; empty while it does not.
    """

    def __init__(self, state: ShardState) -> None:
        self.state = state
        self.stop_reason = ""
        self.changed = threading.RLock()
        self.changes = Changes(self.changed)
        self.apply_lock = threading.RLock()
        self.log_lock = threading.Lock()

    @property
    def machine(self) -> ShardMachine:
        return self.state.machine

    @property
    def shard(self) -> int:
        return self.state.shard

    @property
    def shards(self) -> int:
        """Number of shards; in a reshard, the number after it."""
        return self.state.shards

    @property
    def version(self) -> int:
        return self.state.machine.version

    @property
    def has_begun(self) -> bool:
        return self.state.machine.begun

    @property
    def is_resharding(self) -> bool:
        """Whether this shard lacks its new partition of the model."""
        return self.machine.is_resharding

    @property
    def store(self) -> ParameterStore | None:
        return self.state.store

    def check_shard_count(self, shards: int) -> None:
        """Raise LayoutError if a request is meant for another number of shards; 0: for any."""
        if shards and shards != self.state.shards:
            self._refuse_shard_count(shards, self.state.shards)

    def _refuse_shard_count(self, shards: int, found: int) -> Never:
        raise LayoutError(f"shard {self.shard} belongs to {found} shards, not {shards}")

    def require_store(self, shards: int = 0) -> ParameterStore:
        """Return the arrays.

        shards: as in `check_shard_count`; a reshard may have changed the arrays meanwhile.

        Raises UnreachableError (NOT_READY) if the model is not known, and LayoutError.
        """
        store = self.state.store
        if store is None:
            what = (
                "is waiting for its new partition of the model"
                if self.is_resharding
                else "does not know the job's model yet"
            )
            raise UnreachableError(f"shard {self.shard} {what}", "NOT_READY")
        if shards and shards != store.shards:
            self._refuse_shard_count(shards, store.shards)
        return store

    @contextmanager
    def lock_weights(self, shards: int) -> Iterator[tuple[int, ParameterStore]]:
        """Yield the arrays and the version of their weights; nothing is applied meanwhile.

        shards: as in `check_shard_count`. Raises UnreachableError (NOT_READY) without weights.
        """
        with self.apply_lock:
            self.check_shard_count(shards)
            state = self.state
            if not state.machine.begun or state.store is None:
                raise UnreachableError(f"shard {self.shard} has no weights yet", "NOT_READY")
            yield state.machine.weights_version, state.store

    def state_after(self, index: int) -> dict[str, Any] | None:
        """Return the machine's state if it has applied the entry at `index`, else None."""
        with self.changed:
            return self.machine.state() if self.machine.index >= index else None

    def wait_for_frozen(self, log_id: int, index: int, seconds: float = 0.0) -> FrozenShard:
        """Return the partition that the Reshard entry at this log and index froze.

        Raises UnreachableError (NOT_READY) if it is not frozen within `seconds`, or is discarded.
        """

        def find() -> FrozenShard | None:
            frozen = self.state.frozen
            return frozen if frozen and (frozen.log_id, frozen.index) == (log_id, index) else None

        found = run(until(find, partial(self.changes.watch, None), seconds, ThreadWaiter()))
        if found is None:
            text = f"shard {self.shard} has no partition frozen at entry {index}"
            raise UnreachableError(text, "NOT_READY")
        return found

    def discard_frozen(self) -> None:
        """Drop the partition from before a reshard: no other shard needs it."""
        if self.state.frozen is not None:
            with self.changed:
                self.state.frozen = None

    @contextmanager
    def export_state(self, seconds: float) -> Iterator[Iterator[StateRecord]]:
        """Yield the whole state as records for a standby; nothing is applied or staged meanwhile.

        Raises UnreachableError (NOT_READY) if the shard stays busy for `seconds`, or during a
        reshard, when other shards may still need the previous partition.
        """
        if self.is_resharding or self.state.frozen is not None:
            raise UnreachableError("the job is being resharded", "NOT_READY")
        if not self.apply_lock.acquire(timeout=seconds):
            raise UnreachableError(f"shard {self.shard} is busy", "NOT_READY")
        try:
            with self.log_lock, self.changed:
                yield shard_records(self.state)
        finally:
            self.apply_lock.release()
