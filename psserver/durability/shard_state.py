"""A shard made of records: what its log holds, or what its primary sends, carried out on a
state.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pscommon.core.log_entries import Apply, Begin, Contribution, Entry, Measure, PushKey, Reshard
from pscommon.core.model_spec import ModelSpec
from pscommon.core.partition import PartitionPlan
from pscommon.optim.specs import groups_from_json
from pscommon.system.thread_team import ThreadTeam
from psserver.core.job.entry_log import counted
from psserver.core.shard.state_machine import ShardMachine
from psserver.durability.shard_log import LoggedPush
from psserver.parameters.frozen_shard import FrozenShard
from psserver.parameters.staging import Staging
from psserver.parameters.store import ParameterStore


class LogUnfitError(Exception):
    """Records cannot be carried out on what is there; the text says why."""


@dataclass(slots=True)
class StagedNumbers:
    """A staged push's numbers, and when they were complete (monotonic seconds)."""

    staging: Staging
    since: float


def apply(store: ParameterStore, entry: Apply, kept: Mapping[PushKey, StagedNumbers]) -> None:
    """The numbers' part of an update."""
    store.apply(*_weighted(entry.contributions, kept))


def measure(store: ParameterStore, entry: Measure, kept: Mapping[PushKey, StagedNumbers]) -> float:
    """The sum of squares of this shard's part of the average."""
    return store.square_norm(*_weighted(entry.contributions, kept))


def _weighted(
    counted: Sequence[Contribution], kept: Mapping[PushKey, StagedNumbers]
) -> tuple[list[Staging], list[int], list[float]]:
    stagings: list[Staging] = []
    samples: list[int] = []
    scales: list[float] = []
    for contribution in counted:
        stagings.append(kept[contribution.key].staging)
        samples.append(contribution.samples)
        scales.append(contribution.scale)
    return stagings, samples, scales


class ShardState:
    """shards, machine, kept, model, store, frozen are those of the shard, as far as the records
    that were taken go.
    """

    def __init__(self, shard: int, shards: int, team: ThreadTeam) -> None:
        self.shards = shards
        self.frozen: FrozenShard | None = None
        self.machine = ShardMachine(shard)
        self.kept: dict[PushKey, StagedNumbers] = {}
        self.model: ModelSpec | None = None
        self.store: ParameterStore | None = None
        self._shard, self._team = shard, team

    def become(self, shards: int, state: Mapping[str, Any]) -> None:
        """The machine's state, as one of so many; numbers and staged pushes come besides."""
        self.shards = shards
        self.machine.recover(state)

    def take(self, logged: ModelSpec | LoggedPush | Entry) -> None:
        """The next record. LogUnfitError where it does not go with those before."""
        match logged:
            case ModelSpec():
                self.know(logged)
            case LoggedPush():
                self._stage(logged)
            case _:
                for entry in self.machine.accept(self.machine.epoch, [logged]):
                    self._carry_out(entry)

    def know(self, model: ModelSpec) -> None:
        """Before the first weights the model may change: its first worker may have died."""
        if self.model is None or (
            not self.machine.begun and self.model.fingerprint() != model.fingerprint()
        ):
            self.model, self.store = (
                model,
                ParameterStore(PartitionPlan(model, self.shards), self._shard, self._team),
            )

    def _stage(self, push: LoggedPush) -> None:
        if not self.machine.offer(push.staged):
            return
        if self.store is None or self.model is None:
            raise LogUnfitError("it speaks of pushes before there is a model")
        staging = self.store.allocate_staging(push.absent, push.initial)
        if push.groups_json:
            staging.groups = groups_from_json(push.groups_json, self.model.optimizer)
        offset = 0
        for view in staging.views if push.payload else ():
            view[:] = push.payload[offset : offset + len(view)]
            offset += len(view)
        self.kept[push.staged.key] = StagedNumbers(staging, time.monotonic())

    def _carry_out(self, entry: Entry) -> None:
        if missing := counted([entry]) - self.kept.keys():
            raise LogUnfitError(f"it lacks pushes {sorted(missing)}")
        square_norm = 0.0
        match entry:
            case Measure():
                square_norm = measure(self.numbers, entry, self.kept)
            case Begin():
                self.numbers.set_initial_weights(self.kept[PushKey(entry.worker, 0)].staging)
            case Apply():
                apply(self.numbers, entry, self.kept)
                self.frozen = None
            case Reshard():
                self.hold(entry.index, entry.shards)
        self.machine.done(entry, square_norm)
        for key in [key for key in self.kept if key not in self.machine.staged]:
            staging = self.kept.pop(key).staging
            if self.store is not None:
                self.store.release(staging)

    def hold(self, index: int, shards: int) -> None:
        """The model moves to so many shards, from the Reshard of this index on."""
        self.frozen = FrozenShard(self.machine.epoch, index, self.shards, self.numbers)
        self.shards, self.store = shards, None

    @property
    def numbers(self) -> ParameterStore:
        """Weights and all that goes with them. LogUnfitError where there is no model yet."""
        if self.store is None:
            raise LogUnfitError("it speaks of weights before there is a model")
        return self.store
