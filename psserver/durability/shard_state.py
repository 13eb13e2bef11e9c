"""A shard's state, built by applying the records of its own log or of its primary."""

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
    """The records do not continue the state; the message is the reason."""


@dataclass(slots=True)
class StagedNumbers:
    """A staged push.

    staging: its arrays.
    since: when it became complete, in monotonic seconds.
    """

    staging: Staging
    since: float


def apply(store: ParameterStore, entry: Apply, kept: Mapping[PushKey, StagedNumbers]) -> None:
    """Apply an update to the arrays."""
    store.apply(*_weighted(entry.contributions, kept))


def measure(store: ParameterStore, entry: Measure, kept: Mapping[PushKey, StagedNumbers]) -> float:
    """Return the sum of squares of this shard's part of the average."""
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
    """State of a shard after the records applied so far.

    shards: number of shards.
    machine: the state machine.
    kept: staged pushes.
    model: the job's model; None if unknown.
    store: the arrays; None without a model.
    frozen: the previous partition, kept for other shards after a reshard.
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
        """Set the state machine's state and number of shards; arrays and staged pushes follow."""
        self.shards = shards
        self.machine.recover(state)

    def take(self, logged: ModelSpec | LoggedPush | Entry) -> None:
        """Apply the next record.

        Raises:
            LogUnfitError: The record does not continue the state.
        """
        match logged:
            case ModelSpec():
                self.know(logged)
            case LoggedPush():
                self._stage(logged)
            case _:
                for entry in self.machine.accept(self.machine.epoch, [logged]):
                    self._carry_out(entry)

    def know(self, model: ModelSpec) -> None:
        """Set the model. It may change until the first weights, if a worker crashes before them."""
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
        """Freeze the arrays at the Reshard entry `index` to `shards` shards."""
        self.frozen = FrozenShard(self.machine.epoch, index, self.shards, self.numbers)
        self.shards, self.store = shards, None

    @property
    def numbers(self) -> ParameterStore:
        """The arrays.

        Raises:
            LogUnfitError: There is no model yet.
        """
        if self.store is None:
            raise LogUnfitError("it speaks of weights before there is a model")
        return self.store
