"""A shard's whole state: its state machine, its arrays and the staged pushes.

A running shard, a recovery and a standby each own one. Entries of the job's log change it only
here. Carrying out an entry has two parts: `compute` changes arrays, which may take long, and
`finish` changes everything else.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from pscommon.core.log_entries import (
    Apply,
    Begin,
    Contribution,
    Entry,
    Measure,
    PushKey,
    Reshard,
    SetBuffers,
    Staged,
)
from pscommon.core.model_spec import ModelSpec
from pscommon.core.partition import PartitionPlan
from pscommon.snapshot import Manifest
from pscommon.system.thread_team import ThreadTeam
from pscommon.wire.frames import Filler
from psserver.core.shard.state_machine import ShardMachine
from psserver.durability.shard_log import FrozenNumbers, LoggedPush, SegmentBase
from psserver.parameters.frozen_shard import FrozenShard
from psserver.parameters.push_groups import PushGroups, groups_of_update
from psserver.parameters.staging import Staging
from psserver.parameters.store import ParameterStore, PartReader


class LogUnfitError(Exception):
    """A record or entry does not continue the state; the message is the reason."""


@dataclass(slots=True)
class StagedArrays:
    """The arrays of a staged push.

    staging: the arrays.
    since: when the push became complete, in monotonic seconds.
    """

    staging: Staging
    since: float


class ShardState:
    """State of a shard after the records applied so far. It has no locks.

    shard: number of the shard.
    shards: number of shards.
    machine: the state machine.
    staged: arrays of the staged pushes.
    model: the job's model; None if unknown.
    store: this shard's partition of the model; None without a model, and in a reshard until the
        new partition is complete.
    frozen: the partition from before a reshard, kept for other shards until the next update.
    """

    def __init__(self, shard: int, shards: int, team: ThreadTeam) -> None:
        self.shard = shard
        self.shards = shards
        self.machine = ShardMachine(shard)
        self.staged: dict[PushKey, StagedArrays] = {}
        self.model: ModelSpec | None = None
        self.store: ParameterStore | None = None
        self.frozen: FrozenShard | None = None
        self._team = team

    # ---- beginnings ------------------------------------------------------------------------------

    def load(self, base: SegmentBase) -> None:
        """Set the machine's state and the number of shards; arrays and staged pushes follow."""
        self.shards = base.shards
        self.machine.recover(base.state)

    def restore(self, log_id: int, manifest: Manifest, reader: PartReader) -> None:
        """Load a snapshot; the log `log_id` begins after it.

        Raises:
            SnapshotError: The snapshot cannot be read.
        """
        self.install_model(manifest.model, self.new_store(manifest.model))
        self.loaded_store.restore(reader)
        self.machine.restore(log_id, manifest.version, manifest.index)

    def base(self) -> SegmentBase:
        """Return what a log segment begins with."""
        frozen = self.frozen
        numbers = FrozenNumbers(frozen.index, frozen.shards) if frozen is not None else None
        return SegmentBase(self.shards, self.machine.state(), numbers)

    def staged_pushes(self) -> list[tuple[Staged, Staging]]:
        return [(self.machine.staged[key], arrays.staging) for key, arrays in self.staged.items()]

    # ---- the model -------------------------------------------------------------------------------

    def needs_model(self, model: ModelSpec) -> bool:
        """Return whether this model is new here.

        It may change until the first weights, if a worker crashes before them.
        """
        return self.model is None or (
            not self.machine.begun and self.model.fingerprint() != model.fingerprint()
        )

    def new_store(self, model: ModelSpec) -> ParameterStore:
        """Return arrays for this shard's partition of a model, without values."""
        return ParameterStore(PartitionPlan(model, self.shards), self.shard, self._team)

    def install_model(self, model: ModelSpec, store: ParameterStore) -> None:
        self.model, self.store = model, store

    @property
    def loaded_store(self) -> ParameterStore:
        """The arrays.

        Raises:
            LogUnfitError: There are none yet.
        """
        if self.store is None:
            raise LogUnfitError("it uses weights before a model exists")
        return self.store

    # ---- pushes ----------------------------------------------------------------------------------

    def stage(self, push: Staged, staging: Staging) -> bool:
        """Stage a complete push. Return False if it is known, or not wanted any more."""
        if is_new := self.machine.offer(push):
            self.staged[push.key] = StagedArrays(staging, time.monotonic())
        return is_new

    def release(self, staging: Staging) -> None:
        """Free the arrays of a push that is no longer needed."""
        if self.store is not None:
            self.store.release(staging)

    # ---- the log ---------------------------------------------------------------------------------

    def compute(self, entry: Entry) -> float:
        """Change the arrays as an entry says. Return the result of a Measure, otherwise 0.

        Raises:
            LogUnfitError: The entry needs pushes or weights that this shard lacks.
        """
        if missing := self.machine.missing(entry):
            raise LogUnfitError(f"it lacks pushes {sorted(missing)}")
        match entry:
            case Measure():
                return self.loaded_store.square_norm(*self._weighted(entry.contributions))
            case Begin():
                initial = self.staged[PushKey(entry.worker, 0)].staging
                self.loaded_store.set_initial_weights(initial)
            case SetBuffers():
                staging = self.staged[entry.key].staging
                if self.machine.staged[entry.key].upload:
                    self.loaded_store.take_upload(staging)
                else:
                    self.loaded_store.set_buffers(staging)
            case Apply() if self.machine.staged[entry.contributions[0].key].reduce_round:
                pass  # the workers make this step
            case Apply():
                optimizer = self.machine.staged[entry.contributions[0].key].optimizer
                groups = self.groups_of(entry)
                self.loaded_store.apply(
                    *self._weighted(entry.contributions),
                    optimizer,
                    groups.values if groups is not None else None,
                )
        return 0.0

    def groups_of(self, entry: Apply) -> PushGroups | None:
        """Return the hyper-parameters that an update uses; None: those of the update before."""
        given = list[tuple[int, PushGroups]]()
        for each in entry.contributions:
            if (groups := self.staged[each.key].staging.groups) is not None:
                given.append((each.key.worker, groups))
        return groups_of_update(given) if given else None

    def finish(self, entry: Entry, square_norm: float) -> list[Staging]:
        """Note that an entry was computed. Return the arrays of ended pushes, to be released."""
        match entry:
            case Apply():
                self.frozen = None  # updates begin only when all shards have their partition
            case Reshard():
                self.freeze(entry.index, entry.shards)
        ended = self.machine.done(entry, square_norm)
        return [self.staged.pop(key).staging for key in ended]

    def freeze(self, index: int, shards: int) -> None:
        """Freeze the arrays at the Reshard entry `index` to `shards` shards."""
        self.frozen = FrozenShard(self.machine.log_id, index, self.shards, self.loaded_store)
        self.shards, self.store = shards, None

    def replay(self, logged: ModelSpec | LoggedPush | Entry) -> None:
        """Apply the next record of a log or of a primary.

        Raises:
            LogUnfitError: The record does not continue the state.
        """
        match logged:
            case ModelSpec():
                if self.needs_model(logged):
                    self.install_model(logged, self.new_store(logged))
            case LoggedPush():
                self._replay_push(logged)
            case _:
                for entry in self.machine.accept(self.machine.log_id, [logged]):
                    for staging in self.finish(entry, self.compute(entry)):
                        self.release(staging)

    def _replay_push(self, push: LoggedPush) -> None:
        if not self.machine.offer(push.staged):
            return
        if self.store is None:
            raise LogUnfitError("it contains pushes before a model exists")
        staging = self.store.allocate_staging(push.absent, push.initial, push.parts)
        if push.groups_json:
            staging.groups = self.store.read_groups(
                push.groups_json, push.staged.optimizer, push.has_own_groups
            )
        if push.payload:
            Filler(staging.views).fill(push.payload)
        self.staged[push.staged.key] = StagedArrays(staging, time.monotonic())

    def _weighted(
        self, contributions: Sequence[Contribution]
    ) -> tuple[list[Staging], list[int], list[float]]:
        """Return the arrays, samples and scales of the contributions."""
        stagings, samples, scales = list[Staging](), list[int](), list[float]()
        for each in contributions:
            stagings.append(self.staged[each.key].staging)
            samples.append(each.samples)
            scales.append(each.scale)
        return stagings, samples, scales
