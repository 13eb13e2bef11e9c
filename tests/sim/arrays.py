"""Stand-ins for the arrays of a shard: a few floats, and the shipped states over them."""

import itertools
import random
from array import array
from collections.abc import Collection, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from psserver.durability.shard_recovery import ShardStateFactory
from psserver.durability.shard_state import ShardState
from psserver.durability.state_records import ReceivedState
from psserver.replication.standby_state import StandbyState
from tests.sim.disks import Saved, SimStandby
from tests.sim.invariants import check

if TYPE_CHECKING:
    from tests.sim.world import World

UNITS = 3
"""Numbers in the model; each shard has an equal share or one more."""
NBYTES = 8
KIND = "weight"


def model_of(clip_norm: float | None) -> ModelSpec:
    return ModelSpec(
        (TensorSpec("w", (1,), "float64"),), OptimizerSettings("sgd", clip_norm=clip_norm)
    )


def part_of(numbers: Sequence[float], shard: int, shards: int) -> list[float]:
    """Return a shard's partition of all numbers."""
    return list(numbers[UNITS * shard // shards : UNITS * (shard + 1) // shards])


ARRIVALS = itertools.count()


class SimStaging:
    """Stands for Staging. `number` orders stagings by their arrival."""

    def __init__(self, owner: "SimStore", numbers: Sequence[float], initial: bool) -> None:
        self.owner, self.initial, self.number = owner, initial, next(ARRIVALS)
        self.numbers = array("d", numbers)
        self.absent: frozenset[int] = frozenset()
        self.groups = self.claim = None
        self.views = self.contents = [memoryview(self.numbers).cast("B")]


class SimStore:
    """Stands for ParameterStore: the numbers of one shard, with plain SGD."""

    def __init__(self, model: ModelSpec, shard: int, shards: int, rng: random.Random) -> None:
        self.plan = SimpleNamespace(spec=model, shards=shards)
        self.clips_gradients = model.optimizer.clip_norm is not None
        self._start = UNITS * shard // shards
        self._size = UNITS * (shard + 1) // shards - self._start
        self.weights = [0.0] * self._size
        self._rng = rng

    @property
    def averaged_last(self) -> bool:
        """Sometimes true: the norm of a push is then measured later."""
        return self._rng.random() < 0.1

    def allocate_staging(self, absent: Collection[int] = (), initial: bool = False) -> SimStaging:
        return SimStaging(self, [0.0] * self._size, initial)

    def owns(self, staging: SimStaging) -> bool:
        return staging.owner is self

    def release(self, staging: SimStaging) -> None: ...

    def find_non_finite(self, staging: SimStaging) -> str:
        return ""

    def set_initial_weights(self, staging: SimStaging) -> None:
        self.weights = list(staging.numbers)

    def average(
        self, stagings: Sequence[SimStaging], samples: Sequence[int], scales: Sequence[float]
    ) -> list[float]:
        """Return the weighted mean, summed in this order."""
        total, means = sum(samples), [0.0] * self._size
        for staging, count, scale in zip(stagings, samples, scales, strict=True):
            check(len(staging.numbers) == self._size, "a push has {} numbers", staging.numbers)
            share = count / total * scale
            means = [
                mean + value * share for mean, value in zip(means, staging.numbers, strict=True)
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
        self, stagings: Sequence[SimStaging], samples: Sequence[int], scales: Sequence[float]
    ) -> None:
        means = self.average(stagings, samples, scales)
        self.weights = [weight - mean for weight, mean in zip(self.weights, means, strict=True)]

    def restore(self, reader: Any) -> None:
        numbers = array("d", [0.0] * self._size)
        start, stop = self._start * NBYTES, (self._start + self._size) * NBYTES
        check(reader.read(KIND, start, stop, memoryview(numbers).cast("B")), "numbers are missing")
        self.weights = list(numbers)

    def export(self) -> dict[str, torch.Tensor]:
        numbers = torch.tensor(self.weights, dtype=torch.float64)
        return {f"{KIND}@{self._start * NBYTES}": numbers}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.export().items())

    def groups(self) -> tuple[()]:
        return ()

    def steps(self) -> dict[int, int]:
        return {}

    scalars = steps


class AllNumbers:
    """Reads partitions that lie one after another."""

    def __init__(self, parts: Sequence[Sequence[float]]) -> None:
        numbers = array("d", [number for part in parts for number in part])
        self._bytes = memoryview(numbers).cast("B")

    def read(self, kind: str, start: int, stop: int, out: memoryview) -> bool:
        out[:] = self._bytes[start:stop]
        return True


class SimSnapshots:
    """Stands for SnapshotManager."""

    def __init__(self, world: "World") -> None:
        self._world = world

    def reader(self, saved: Saved, shards: int) -> AllNumbers:
        return AllNumbers(
            [disk.parts[saved.index][1] for disk in self._world.disks[: saved.shards]]
        )

    def note_loaded(self, saved: Saved | None) -> None: ...

    def close(self) -> None: ...


class SimState(ShardState):
    """A shard's state over a SimStore."""

    def __init__(self, shard: int, shards: int, rng: random.Random) -> None:
        super().__init__(shard, shards, rng)  # type: ignore[arg-type]
        self._rng = rng

    def new_store(self, model: ModelSpec) -> Any:
        return SimStore(model, self.shard, self.shards, self._rng)


class SimStates(ShardStateFactory):
    """Creates such states."""

    def empty(self, shards: int) -> ShardState:
        return SimState(self._shard, shards, self._team)  # type: ignore[arg-type]


class SimStandbyState(StandbyState):
    """What a standby has replicated, over a SimStore."""

    def __init__(self, world: "World", shard: int, standby: SimStandby) -> None:
        self.shard_state = SimState(shard, 0, world.rng)
        self.coordinator = None
        self._config = SimpleNamespace(rules=world.rules)  # type: ignore[assignment]
        self._received = ReceivedState()
        with world.coordinator_classes():
            for record in standby.records:
                self.take(record)
