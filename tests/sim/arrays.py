"""Replacements for the arrays of a shard: a few floats, and the shipped states with such arrays."""

import itertools
import random
from array import array
from collections.abc import Collection, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from pscommon.wire.push import Part
from psserver.durability.shard_recovery import ShardStateFactory
from psserver.durability.shard_state import ShardState
from psserver.durability.state_records import ReceivedState
from psserver.parameters.store import clipped_optimizers
from psserver.replication.standby_state import StandbyState
from tests.sim.disks import SimManifest, SimStandby
from tests.sim.invariants import check

if TYPE_CHECKING:
    from tests.sim.world import World

WEIGHT_COUNT = 3
"""Number of weights in the model. Each shard has an equal share, or one more."""
WEIGHT_BYTES = 8
KIND = "weight"


def model_of(optimizers: Sequence[str], clip_norm: float | None) -> ModelSpec:
    settings = OptimizerSettings("sgd", clip_norm=clip_norm)
    if len(optimizers) == 1:
        return ModelSpec((TensorSpec("w", (1,), "float64"),), settings)
    return ModelSpec(
        tuple(
            TensorSpec(f"{name}.w", (1,), "float64", group=group)
            for group, name in enumerate(optimizers)
        ),
        dict.fromkeys(optimizers, settings),
    )


def weights_of(optimizer: str) -> range:
    """Return the indices of the weights that an optimizer updates."""
    return {"": range(WEIGHT_COUNT), "d": range(2), "g": range(2, WEIGHT_COUNT)}[optimizer]


def partition_of(values: Sequence[float], shard: int, shards: int) -> list[float]:
    """Return a shard's partition of weights or gradients."""
    return list(values[WEIGHT_COUNT * shard // shards : WEIGHT_COUNT * (shard + 1) // shards])


ARRIVAL_NUMBERS = itertools.count()


class SimStaging:
    """Replaces Staging.

    number: position in the order of arrival.
    values: the shard's part of the gradient, or of the initial weights.
    """

    def __init__(self, owner: "SimStore", values: Sequence[float], initial: bool) -> None:
        self.owner, self.initial, self.number = owner, initial, next(ARRIVAL_NUMBERS)
        self.values = array("d", values)
        self.absent: frozenset[int] = frozenset()
        self.groups = self.claim = None
        self.named_parts = ()
        self.views = self.contents = [memoryview(self.values).cast("B")]


class SimStore:
    """Replaces ParameterStore: the weights of one shard, with plain SGD."""

    def __init__(self, model: ModelSpec, shard: int, shards: int, rng: random.Random) -> None:
        self.plan = SimpleNamespace(spec=model, shards=shards)
        self.clipped = clipped_optimizers(model)
        self._start = WEIGHT_COUNT * shard // shards
        self._size = WEIGHT_COUNT * (shard + 1) // shards - self._start
        self.weights = [0.0] * self._size
        self._rng = rng

    @property
    def averaged_last(self) -> bool:
        """Return True at random; the shard then measures the norm of a push later."""
        return self._rng.random() < 0.1

    def allocate_staging(
        self, absent: Collection[int] = (), initial: bool = False, parts: Sequence[Part] = ()
    ) -> SimStaging:
        return SimStaging(self, [0.0] * self._size, initial)

    def owns(self, staging: SimStaging) -> bool:
        return staging.owner is self

    def release(self, staging: SimStaging) -> None: ...

    def find_non_finite(self, staging: SimStaging) -> str:
        return ""

    def set_initial_weights(self, staging: SimStaging) -> None:
        self.weights = list(staging.values)

    def take_upload(self, staging: SimStaging) -> None:
        self.weights = list(staging.values)

    def set_buffers(self, staging: SimStaging) -> None:
        check(not any(staging.values), "a push of buffers only has gradients {}", staging.values)

    def average(
        self, stagings: Sequence[SimStaging], samples: Sequence[int], scales: Sequence[float]
    ) -> list[float]:
        """Return the weighted mean, summed in this order."""
        total, means = sum(samples), [0.0] * self._size
        for staging, count, scale in zip(stagings, samples, scales, strict=True):
            check(len(staging.values) == self._size, "a push has the gradient {}", staging.values)
            share = count / total * scale
            means = [
                mean + value * share for mean, value in zip(means, staging.values, strict=True)
            ]
        return means

    def square_norm(
        self,
        stagings: Sequence[SimStaging],
        samples: Sequence[int] = (1,),
        scales: Sequence[float] = (),
    ) -> float:
        means = self.average(stagings, samples, scales or [1.0] * len(samples))
        return sum(mean * mean for mean in means)

    def apply(
        self,
        stagings: Sequence[SimStaging],
        samples: Sequence[int],
        scales: Sequence[float],
        optimizer: str,
        groups: None,
    ) -> None:
        means = self.average(stagings, samples, scales)
        for place, mean in enumerate(means):
            if place + self._start in weights_of(optimizer):
                self.weights[place] -= mean

    def restore(self, reader: Any) -> None:
        weights = array("d", [0.0] * self._size)
        start, stop = self._start * WEIGHT_BYTES, (self._start + self._size) * WEIGHT_BYTES
        is_complete = reader.read(KIND, start, stop, memoryview(weights).cast("B"))
        check(is_complete, "weights are missing")
        self.weights = list(weights)

    def export(self) -> dict[str, torch.Tensor]:
        weights = torch.tensor(self.weights, dtype=torch.float64)
        return {f"{KIND}@{self._start * WEIGHT_BYTES}": weights}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.export().items())

    def groups(self) -> tuple[()]:
        return ()

    def steps(self) -> dict[int, int]:
        return {}

    scalars = steps


class PartitionReader:
    """Reads weights from the partitions of all shards."""

    def __init__(self, parts: Sequence[Sequence[float]]) -> None:
        weights = array("d", [weight for part in parts for weight in part])
        self._bytes = memoryview(weights).cast("B")

    def read(self, kind: str, start: int, stop: int, out: memoryview) -> bool:
        out[:] = self._bytes[start:stop]
        return True


class SimSnapshots:
    """Replaces SnapshotManager."""

    def __init__(self, world: "World") -> None:
        self._world = world

    def reader(self, snapshot: SimManifest, shards: int) -> PartitionReader:
        return PartitionReader(
            [disk.parts[snapshot.index][1] for disk in self._world.disks[: snapshot.shards]]
        )

    def note_loaded(self, snapshot: SimManifest | None) -> None: ...

    def close(self) -> None: ...


class SimState(ShardState):
    """The shipped state of a shard, with a SimStore."""

    def __init__(self, shard: int, shards: int, rng: random.Random) -> None:
        super().__init__(shard, shards, rng)  # type: ignore[arg-type]
        self._rng = rng

    def new_store(self, model: ModelSpec) -> Any:
        return SimStore(model, self.shard, self.shards, self._rng)


class SimStateFactory(ShardStateFactory):
    """The shipped factory, which here creates SimState."""

    def empty(self, shards: int) -> ShardState:
        return SimState(self._shard, shards, self._team)  # type: ignore[arg-type]


class SimStandbyState(StandbyState):
    """The shipped state of a standby, with a SimStore."""

    def __init__(self, world: "World", shard: int, standby: SimStandby) -> None:
        self.shard_state = SimState(shard, 0, world.rng)
        self.coordinator = None
        self._config = SimpleNamespace(rules=world.rules)  # type: ignore[assignment]
        self._received = ReceivedState()
        with world.coordinator_classes():
            for record in standby.records:
                self.take(record)
