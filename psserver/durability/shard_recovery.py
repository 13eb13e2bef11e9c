"""How a shard's state begins: empty, from a snapshot, from its own log, or as a new shard of a
reshard.

Crash recovery loads a snapshot, then replays the shard's log. A reshard is replayed up to the
Reshard entry. The shard then has its previous partition, which other shards read, and builds its
new partition again. No update has changed the new one yet.
"""

from collections.abc import Collection, Mapping
from typing import Any

from pscommon.core.errors import SnapshotError
from pscommon.core.log_entries import Entry
from pscommon.core.model_spec import ModelSpec
from pscommon.snapshot import Manifest
from pscommon.system.thread_team import ThreadTeam
from pscommon.wal.log import LogDamagedError
from psserver.durability.shard_log import LoggedPush, SegmentBase, ShardLog
from psserver.durability.shard_state import LogUnfitError, ShardState
from psserver.durability.snapshots import SnapshotManager


class ShardStateFactory:
    """Creates the states of one shard. The caller installs them.

    team: Threads that work on one update.
    """

    def __init__(
        self, shard: int, team: ThreadTeam, snapshots: SnapshotManager, log: ShardLog
    ) -> None:
        self._shard, self._team, self._snapshots, self._log = shard, team, snapshots, log

    def empty(self, shards: int) -> ShardState:
        """Return a state that follows no log yet."""
        return ShardState(self._shard, shards, self._team)

    def fresh(self, log_id: int, base: int, shards: int) -> ShardState:
        """Return a state without a model that follows a new log from the entry after `base` on."""
        state = self.empty(shards)
        state.machine.follow(log_id, base)
        return state

    def from_snapshot(self, log_id: int, manifest: Manifest, shards: int) -> ShardState:
        """Return a snapshot's state, as one of `shards` shards.

        Raises SnapshotError if the snapshot cannot be read.
        """
        self._snapshots.close()  # the new history must not contain a part of the old one
        state = self.empty(shards)
        state.restore(log_id, manifest, self._snapshots.reader(manifest, shards))
        self._snapshots.note_loaded(manifest)
        return state

    def from_log(
        self, log_id: int, manifest: Manifest | None, possible_shards: Collection[int]
    ) -> ShardState:
        """Return the state before a crash.

        Args:
            manifest: The snapshot that the log continues; None: the log begins with the job.
            possible_shards: Allowed numbers of shards at the end of the log. During a reshard
                these are the numbers before and after it.

        Raises LogUnfitError if the log does not continue the snapshot, SnapshotError if the
        snapshot cannot be read.
        """
        replay = _Replay(self.empty(0), log_id, manifest, self._snapshots)
        replay.read(self._log, possible_shards)
        self._snapshots.note_loaded(manifest)
        return replay.state

    def joining(
        self, log_id: int, peer_state: Mapping[str, Any], model: ModelSpec, shards: int
    ) -> ShardState:
        """Return the state of a new shard in a reshard, from that of another shard's machine."""
        state = self.empty(shards)
        state.machine.adopt({**peer_state, "epoch": log_id})
        state.model = model
        return state


class _Replay:
    """The replay of a shard's log."""

    def __init__(
        self, state: ShardState, log_id: int, manifest: Manifest | None, snapshots: SnapshotManager
    ) -> None:
        self.state = state
        self._log_id, self._manifest, self._snapshots = log_id, manifest, snapshots
        self._version = manifest.version if manifest else 0  # at which the log must begin
        self._skipped = False

    def read(self, log: ShardLog, possible_shards: Collection[int]) -> None:
        state, is_first = self.state, True
        try:
            for logged in log.records_since(self._manifest.version if self._manifest else None):
                if is_first and self._is_before(logged):
                    continue
                if isinstance(logged, SegmentBase):
                    self._begin_segment(logged, is_first)
                else:
                    state.replay(logged)
                is_first = False
        except (LogDamagedError, OSError, SnapshotError, ValueError, KeyError, TypeError) as error:
            raise LogUnfitError(str(error)) from error
        if is_first:
            raise LogUnfitError(f"there is none since version {self._version}")
        if state.shards not in possible_shards:
            raise LogUnfitError(
                f"{state.shards} servers wrote it, and there are {min(possible_shards)} now"
            )

    def _is_before(self, logged: SegmentBase | ModelSpec | LoggedPush | Entry) -> bool:
        """Return whether a record at the snapshot's version is older than the snapshot's cut.

        This happens if a reshard ended with the snapshot.
        """
        if not isinstance(logged, SegmentBase):
            if self._skipped:
                return True
            raise LogUnfitError("it does not begin with a state")
        state, manifest = logged.state, self._manifest
        before = (
            manifest is not None
            and state["version"] == manifest.version
            and state["index"] < manifest.index
        )
        self._skipped = self._skipped or before
        return before

    def _begin_segment(self, base: SegmentBase, is_first: bool) -> None:
        """Check that a segment begins where the previous one, or the snapshot, ended."""
        state, recorded = self.state, base.state
        if not is_first and base.shards != state.shards:
            raise LogUnfitError(
                f"{base.shards} servers wrote it, and there were {state.shards} before"
            )
        if recorded["epoch"] != self._log_id:
            raise LogUnfitError("it belongs to another start of the job")
        if is_first and recorded["version"] != self._version:
            raise LogUnfitError(
                f"it begins at version {recorded['version']}, the snapshot is of {self._version}"
            )
        if is_first:
            self._load(base)
        elif recorded["index"] != state.machine.index:
            raise LogUnfitError(
                f"entries {state.machine.index + 1} to {recorded['index']} are missing"
            )

    def _load(self, base: SegmentBase) -> None:
        """Load the first segment's state and the snapshot's arrays.

        In an unfinished reshard they are the previous partition. A reshard that ended with the
        snapshot is complete, even if the segment began before it ended.
        """
        state, manifest = self.state, self._manifest
        if manifest is None:
            if base.state["begun"]:
                raise LogUnfitError("it continues a snapshot that does not exist")
            return state.load(base)
        previous = base.frozen if base.frozen and base.frozen.reshard > manifest.index else None
        shards = previous.shards if previous else base.shards
        state.load(SegmentBase(shards, base.state | {"moving": previous is not None}))
        if state.shard >= shards:
            raise LogUnfitError(f"the job was resharded to {shards} servers")
        state.install_model(manifest.model, state.new_store(manifest.model))
        state.loaded_store.restore(self._snapshots.reader(manifest, shards))
        if previous is not None:
            state.freeze(previous.reshard, base.shards)
        return None
