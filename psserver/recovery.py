"""A shard made again after its process died: the snapshot's numbers, and on top of them what its log says."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pscommon.core.errors import SnapshotError
from pscommon.core.log import Apply, Begin, Entry, PushKey
from pscommon.core.model import ModelSpec
from pscommon.core.tape import Plan
from pscommon.optimizers import groups_from_json
from pscommon.record_log import LogDamagedError
from pscommon.snapshot import Manifest
from pscommon.team import Team
from psserver.core.job_log import counted
from psserver.core.shard import Shard
from psserver.shard_log import Base, LoggedPush, ShardLog
from psserver.staging import Staging
from psserver.store import Store, TapeReader


class LogUnfitError(Exception):
    """A log cannot be carried out on what is there; the text says why."""


@dataclass(slots=True)
class Kept:
    """A staged push's numbers, and when they were complete (monotonic seconds)."""

    staging: Staging
    since: float


def apply(store: Store, entry: Apply, kept: Mapping[PushKey, Kept]) -> None:
    """The numbers' part of an update."""
    counted = entry.contributions
    stagings = [kept[contribution.key].staging for contribution in counted]
    store.apply(stagings, [c.samples for c in counted], [c.scale for c in counted])


class Recovery:
    """Reads a shard's log. Afterwards machine, kept, model and store are what they were."""

    def __init__(
        self,
        shard: int,
        shards: int,
        team: Team,
        epoch: int,
        manifest: Manifest | None,
        reader: TapeReader | None,
    ) -> None:
        self.machine = Shard(shard)
        self.kept: dict[PushKey, Kept] = {}
        self.model: ModelSpec | None = None
        self.store: Store | None = None
        self._shard, self._shards, self._team, self._epoch = shard, shards, team, epoch
        self._version = manifest.version if manifest else 0
        if manifest is not None and reader is not None:
            self._know(manifest.model)
            assert self.store is not None
            self.store.restore(reader)

    def read(self, log: ShardLog) -> None:
        """Carry out all that the log holds since the snapshot. LogUnfitError where it does not go with it."""
        first = True
        try:
            for logged in log.since(self._version):
                if first and not isinstance(logged, Base):
                    raise LogUnfitError("it does not begin with a state")
                self._take(logged, first)
                first = False
        except (LogDamagedError, OSError, SnapshotError, ValueError, KeyError, TypeError) as error:
            raise LogUnfitError(str(error)) from error
        if first:
            raise LogUnfitError(f"there is none since version {self._version}")

    def _take(self, logged: Base | ModelSpec | LoggedPush | Entry, first: bool) -> None:
        match logged:
            case Base():
                self._check(logged, first)
            case ModelSpec():
                self._know(logged)
            case LoggedPush():
                self._stage(logged)
            case _:
                for entry in self.machine.accept(self._epoch, [logged]):
                    self._carry_out(entry)

    def _check(self, base: Base, first: bool) -> None:
        """A segment must go on where the one before it, or the snapshot, ended."""
        state: dict[str, Any] = base.state
        if base.shards != self._shards:
            raise LogUnfitError(f"{base.shards} servers wrote it, and there are {self._shards} now")
        if state["epoch"] != self._epoch:
            raise LogUnfitError("it is of another start of the job")
        if first and state["version"] != self._version:
            raise LogUnfitError(f"it begins at version {state['version']}, the snapshot is of {self._version}")
        if first:
            self.machine.recover(state)
        elif state["index"] != self.machine.index:
            raise LogUnfitError(f"entries {self.machine.index + 1} to {state['index']} are missing")

    def _know(self, model: ModelSpec) -> None:
        """Before the first weights the model may change: its first worker may have died."""
        if self.model is None or (not self.machine.begun and self.model.fingerprint() != model.fingerprint()):
            self.model, self.store = model, Store(Plan(model, self._shards), self._shard, self._team)

    def _stage(self, push: LoggedPush) -> None:
        if not self.machine.offer(push.staged):
            return
        if self.store is None or self.model is None:
            raise LogUnfitError("it speaks of pushes before there is a model")
        staging = self.store.staging(push.absent, push.initial)
        if push.groups_json:
            staging.groups = groups_from_json(push.groups_json, self.model.optimizer)
        offset = 0
        for view in staging.views if push.payload else ():
            view[:] = push.payload[offset : offset + len(view)]
            offset += len(view)
        self.kept[push.staged.key] = Kept(staging, time.monotonic())

    def _carry_out(self, entry: Entry) -> None:
        if missing := counted([entry]) - self.kept.keys():
            raise LogUnfitError(f"it lacks pushes {sorted(missing)}")
        match entry:
            case Begin():
                self._numbers.begin(self.kept[PushKey(entry.worker, 0)].staging)
            case Apply():
                apply(self._numbers, entry, self.kept)
        self.machine.done(entry)
        for key in [key for key in self.kept if key not in self.machine.staged]:
            self._numbers.release(self.kept.pop(key).staging)

    @property
    def _numbers(self) -> Store:
        if self.store is None:
            raise LogUnfitError("it speaks of weights before there is a model")
        return self.store
