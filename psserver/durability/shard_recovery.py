"""Crash recovery of a shard: load a snapshot, then replay the shard's log.

A reshard is replayed up to the Reshard entry. The shard then has its previous partition, which
other shards read, and builds its new partition again. No update has changed the new one yet.
"""

from collections.abc import Callable, Collection
from typing import Any

from pscommon.core.errors import SnapshotError
from pscommon.core.log_entries import Entry
from pscommon.core.model_spec import ModelSpec
from pscommon.snapshot import Manifest
from pscommon.system.thread_team import ThreadTeam
from pscommon.wal.log import LogDamagedError
from psserver.durability.shard_log import LoggedPush, SegmentBase, ShardLog
from psserver.durability.shard_state import LogUnfitError, ShardState
from psserver.parameters.store import PartReader

Open = Callable[[int], PartReader]
"""Open the snapshot for a given number of shards."""


class ShardRecovery(ShardState):
    """Replay a shard's log; afterwards the attributes of ShardState are those before the crash.

    shards: allowed numbers of shards at the end of the log. During a reshard these are the numbers
        before and after it.
    """

    def __init__(
        self,
        shard: int,
        shards: Collection[int],
        team: ThreadTeam,
        epoch: int,
        manifest: Manifest | None,
        snapshot: Open | None,
    ) -> None:
        super().__init__(shard, 0, team)
        self._possible, self._epoch = shards, epoch
        self._manifest, self._snapshot = manifest, snapshot
        self._skipped = False

    @property
    def _version(self) -> int:
        """Version at which the log must begin."""
        return self._manifest.version if self._manifest else 0

    def read(self, log: ShardLog) -> None:
        """Replay the log since the snapshot.

        Raises:
            LogUnfitError: The log does not continue the snapshot.
        """
        first = True
        try:
            for logged in log.since(self._manifest.version if self._manifest else None):
                if first and self._is_before(logged):
                    continue
                self._take(logged, first)
                first = False
        except (LogDamagedError, OSError, SnapshotError, ValueError, KeyError, TypeError) as error:
            raise LogUnfitError(str(error)) from error
        if first:
            raise LogUnfitError(f"there is none since version {self._version}")
        if self.shards not in self._possible:
            raise LogUnfitError(
                f"{self.shards} servers wrote it, and there are {min(self._possible)} now"
            )

    def _is_before(self, logged: SegmentBase | ModelSpec | LoggedPush | Entry) -> bool:
        """Return whether a record at the snapshot's version is older than the snapshot's cut.

        This happens if a reshard ended with the snapshot.
        """
        if not isinstance(logged, SegmentBase):
            if self._skipped:
                return True
            raise LogUnfitError("it does not begin with a state")
        state = logged.state
        manifest = self._manifest
        before = (
            manifest is not None
            and state["version"] == manifest.version
            and state["index"] < manifest.index
        )
        self._skipped = self._skipped or before
        return before

    def _take(self, logged: SegmentBase | ModelSpec | LoggedPush | Entry, first: bool) -> None:
        if isinstance(logged, SegmentBase):
            self._check(logged, first)
        else:
            self.take(logged)

    def _check(self, base: SegmentBase, first: bool) -> None:
        """Check that a segment begins where the previous one, or the snapshot, ended."""
        state: dict[str, Any] = base.state
        if not first and base.shards != self.shards:
            raise LogUnfitError(
                f"{base.shards} servers wrote it, and there were {self.shards} before"
            )
        if state["epoch"] != self._epoch:
            raise LogUnfitError("it is of another start of the job")
        if first and state["version"] != self._version:
            raise LogUnfitError(
                f"it begins at version {state['version']}, the snapshot is of {self._version}"
            )
        if first:
            self._begin(base)
        elif state["index"] != self.machine.index:
            raise LogUnfitError(f"entries {self.machine.index + 1} to {state['index']} are missing")

    def _begin(self, base: SegmentBase) -> None:
        """Load the snapshot's arrays.

        In an unfinished reshard they are the previous partition. A reshard that ended with the
        snapshot is complete, even if the segment began before it ended.
        """
        manifest, snapshot = self._manifest, self._snapshot
        if manifest is None or snapshot is None:
            if base.state["begun"]:
                raise LogUnfitError("it goes on from weights, and there is no snapshot of them")
            return self.become(base.shards, base.state)
        held = base.held if base.held is not None and base.held.reshard > manifest.index else None
        self.become(held.shards if held else base.shards, base.state | {"moving": held is not None})
        if self._shard >= self.shards:
            raise LogUnfitError(f"the job has moved to {self.shards} servers")
        self.know(manifest.model)
        self.numbers.restore(snapshot(self.shards))
        if held is not None:
            self.hold(held.reshard, base.shards)
        return None
