"""All shards of a job as plain objects, and one torch process for comparison."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from pscommon.core.partition import PartitionPlan
from pscommon.optim import KINDS
from pscommon.system.thread_team import ALONE, ThreadTeam
from psserver.parameters.push_groups import PushGroups
from psserver.parameters.staging import Staging
from psserver.parameters.store import ParameterStore

Named = Mapping[str, Tensor]
SGD = OptimizerSettings("sgd", ({"lr": 1.0},))
GARBAGE = 0xFF
"""Padding byte: NaN in every floating dtype. It must not reach a result."""


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread: small tensors are slower on several, mainly beside other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Shards:
    """Stores of one job. Tensors are given and returned by name, in the shapes of the model."""

    def __init__(self, spec: ModelSpec, shards: int, team: ThreadTeam = ALONE) -> None:
        self.plan = PartitionPlan(spec, shards)
        self.stores = [ParameterStore(self.plan, shard, team) for shard in range(shards)]
        self.extents = {t.name: (self.plan.extent(i), t) for i, t in enumerate(spec.tensors)}

    def begin(self, values: Named) -> None:
        for store, staging in zip(self.stores, self.stage(values, initial=True), strict=True):
            store.set_initial_weights(staging)
            store.release(staging)

    def stage(self, values: Named, groups: Any = None, initial: bool = False) -> list[Staging]:
        """Stage one push on every shard; trainable tensors that are missing count as absent."""
        buffer = torch.full((self.plan.nbytes,), GARBAGE, dtype=torch.uint8)
        for name, value in values.items():
            extent, _ = self.extents[name]
            buffer[extent.start : extent.stop] = value.contiguous().view(-1).view(torch.uint8)
        tensors = self.plan.spec.tensors
        absent = [
            i for i, t in enumerate(tensors) if t.role == "trainable" and t.name not in values
        ]
        stagings = [store.allocate_staging(absent, initial) for store in self.stores]
        for shard, staging in enumerate(stagings):
            staging.groups = PushGroups(groups, "") if groups is not None else None
            fill(staging.views, self._wire(buffer, shard, absent, initial))
        return stagings

    def apply(
        self, pushes: Sequence[list[Staging]], samples: Sequence[int], optimizer: str = ""
    ) -> None:
        for shard, store in enumerate(self.stores):
            parts = [push[shard] for push in pushes]
            for part in parts:
                store.check_optimizer(part, optimizer)
            groups = next((part.groups.values for part in parts if part.groups is not None), None)
            store.apply(parts, samples, optimizer=optimizer, groups=groups)
            for part in parts:
                store.release(part)

    def step(
        self,
        *pushes: Named,
        samples: Sequence[int] = (),
        groups: Any = None,
        optimizer: str = "",
    ) -> None:
        self.apply(
            [self.stage(push, groups) for push in pushes], samples or [1] * len(pushes), optimizer
        )

    def weights(self) -> dict[str, Tensor]:
        buffer = torch.zeros(self.plan.nbytes, dtype=torch.uint8)
        for shard, store in enumerate(self.stores):
            reading = store.read(everything=True)
            wire = b"".join(reading.views())
            reading.close()
            for role in ("buffer", "trainable", "frozen"):
                span = self.plan.range(shard, role)
                part, wire = wire[: span.nbytes], wire[span.nbytes :]
                buffer[span.start : span.stop] = (
                    torch.frombuffer(bytearray(part), dtype=torch.uint8) if part else 0
                )
            assert not wire
        return {
            name: buffer[extent.start : extent.stop]
            .view(getattr(torch, t.dtype))
            .view(t.shape)
            .clone()
            for name, (extent, t) in self.extents.items()
        }

    def steps(self) -> dict[str, int]:
        merged = {index: count for store in self.stores for index, count in store.steps().items()}
        return {self.plan.spec.tensors[index].name: count for index, count in merged.items()}

    def _wire(
        self, buffer: Tensor, shard: int, absent: list[int], initial: bool
    ) -> Iterator[bytes]:
        yield from (
            buffer[span.start : span.stop].numpy().tobytes()
            for span in self.plan.without(self.plan.range(shard, "trainable"), absent)
        )
        for role in ("buffer", "frozen") if initial else ("buffer",):
            span = self.plan.range(shard, role)
            yield buffer[span.start : span.stop].numpy().tobytes()


def fill(views: list[memoryview], wire: Iterator[bytes]) -> None:
    """Copy the wire bytes into the views; both must end together."""
    data = b"".join(wire)
    for view in views:
        view[:] = data[: len(view)]
        data = data[len(view) :]
    assert not data


class Plain:
    """One torch process with torch's own implementation, for comparison with the shards."""

    def __init__(
        self, cls: type[torch.optim.Optimizer], spec: ModelSpec, values: Named, **arguments: Any
    ) -> None:
        self.weights = {name: value.clone() for name, value in values.items()}
        members: list[list[Tensor]] = [[] for _ in spec.optimizer.groups]
        for tensor in spec.tensors:
            if tensor.role == "trainable":
                members[tensor.group].append(self.weights[tensor.name])
        groups = [{"params": m, **g} for m, g in zip(members, spec.optimizer.groups, strict=True)]
        self.optimizer = cls(groups, **arguments)

    def step(self, *pushes: Named, samples: Sequence[int] = (), groups: Any = None) -> None:
        """Apply the mean of the gradients, summed in order; missing ones count as zero unless all
        are missing.
        """
        counts = samples or [1] * len(pushes)
        for name, weight in self.weights.items():
            weighted = [
                (push[name], n / sum(counts))
                for push, n in zip(pushes, counts, strict=True)
                if name in push
            ]
            weight.grad = (
                sum((g * factor for g, factor in weighted[1:]), weighted[0][0] * weighted[0][1])
                if weighted
                else None
            )
        for group, changed in zip(self.optimizer.param_groups, groups or [], strict=False):
            group.update(changed)
        self.optimizer.step()


def plain_of(spec: ModelSpec, values: Named) -> Plain:
    """Return the torch process with the optimizer of the model."""
    kind, first = KINDS[spec.optimizer.name], spec.optimizer.groups[0]
    arguments = {key: first.get(key, kind.defaults[key]) for key in kind.constructor_only}
    return Plain(kind.torch_class, spec, values, **arguments)


def model(*tensors: tuple[Any, ...], optimizer: OptimizerSettings) -> ModelSpec:
    """Return a model of tensors (shape, dtype) or (shape, dtype, role or group), named t0,
    t1, ...
    """
    specs = []
    for number, (shape, dtype, *rest) in enumerate(tensors):
        role = rest[0] if rest and isinstance(rest[0], str) else "trainable"
        group = rest[0] if rest and isinstance(rest[0], int) else 0
        specs.append(TensorSpec(f"t{number}", shape, dtype, role, group))
    return ModelSpec(tuple(specs), optimizer)


def noise(
    spec: ModelSpec, seed: int, scale: float = 1.0, roles: Sequence[str] = ("trainable",)
) -> dict[str, Tensor]:
    """Return random values for each tensor of these roles, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        t.name: _random(t, generator).mul(scale).to(getattr(torch, t.dtype))
        for t in spec.tensors
        if t.role in roles
    }


def _random(tensor: TensorSpec, generator: torch.Generator) -> Tensor:
    if tensor.dtype in ("float64", "float32", "float16", "bfloat16"):
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return torch.randint(0, 2, tensor.shape, generator=generator)


def begun(spec: ModelSpec, shards: int = 1, values: dict[str, Tensor] | None = None) -> Shards:
    job = Shards(spec, shards)
    job.begin(noise(spec, 1, roles=("trainable", "buffer", "frozen")) | (values or {}))
    return job
