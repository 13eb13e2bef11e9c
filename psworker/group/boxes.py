"""Boxes: which part of which tensor each rank of a group holds.

A box is a part of a tensor: a place (`offsets`) and a size in each dimension. A rank that has a
whole tensor has one box of it; of a DTensor it has the box that torch.distributed.checkpoint
writes. Several ranks may hold equal boxes, as of a replicated tensor.

If one rank holds a box, or torch has reduced its gradient, the lowest rank that holds it writes it
into the group's gradient. Otherwise it is averaged over the ranks: each has room for it in its part
of the shared memory.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pscommon.core.errors import InvalidRequestError, MismatchError
from pscommon.core.model_spec import FLOATING, ITEMSIZE, ModelSpec, TensorSpec
from pscommon.core.partition import PartitionPlan, padded
from psworker.model.flat_buffer import tensor_of


class Box(NamedTuple):
    """A part of a tensor, as a rank describes it.

    Attributes:
        name: Name of the tensor.
        offsets: Its first element in each dimension.
        sizes: Number of elements in each dimension.
        reduced_over: Ranks over which torch reduces its gradient in backward; empty: none.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    reduced_over: tuple[int, ...] = ()

    @staticmethod
    def from_json(fields: Sequence[Any]) -> "Box":
        name, *numbers = fields
        return Box(name, *map(tuple, numbers))


class SpreadModel(NamedTuple):
    """What a rank holds of a model that is spread over the ranks.

    Attributes:
        boxes: Its boxes, without empty ones.
        parameters: Number of tensors in its spec that are parameters; they come first.
        stage: Number of its pipeline stage; None: it has none.
    """

    boxes: Sequence[Box]
    parameters: int
    stage: int | None = None


def merged(specs: Sequence[ModelSpec], models: Sequence[SpreadModel]) -> ModelSpec:
    """Return the spec of the whole model from those of the ranks, by rank.

    Raises:
        MismatchError: Ranks describe a tensor or the optimizer differently, or two stages have a
            tensor with the same name.
    """
    found: dict[str, tuple[TensorSpec, int]] = {}
    rows = [
        (number >= model.parameters, model.stage or 0, rank, number, tensor)
        for rank, (spec, model) in enumerate(zip(specs, models, strict=True))
        for number, tensor in enumerate(spec.tensors)
    ]
    # parameters first, as in a model on one rank
    for _, _, rank, _, tensor in sorted(rows, key=lambda row: row[:4]):
        known, first = found.setdefault(tensor.name, (tensor, rank))
        if models[first].stage != models[rank].stage:
            raise MismatchError(
                f"tensor {tensor.name} is on the pipeline stages {models[first].stage} and "
                f"{models[rank].stage}. Try: the names of the whole model on each stage, as with "
                "torch.nn.ModuleDict; a tensor on one stage only",
                "MODEL_MISMATCH",
            )
        if known != tensor:
            raise MismatchError(
                f"ranks {first} and {rank} of this group have different models: tensor "
                f"{tensor.name} is {known.describe()} and {tensor.describe()}. Try: the same "
                "script and arguments on all ranks",
                "MODEL_MISMATCH",
            )
    for rank, spec in enumerate(specs):
        if spec.optimizer_json() != specs[0].optimizer_json():
            raise MismatchError(
                f"ranks 0 and {rank} of this group have different optimizers. Try: the same class, "
                "parameter groups and settings on all ranks",
                "MODEL_MISMATCH",
            )
    return ModelSpec(tuple(tensor for tensor, _ in found.values()), specs[0].optimizer)


class SharedBox(NamedTuple):
    """A box of the whole model.

    Attributes:
        tensor: Index of its tensor in the spec.
        holders: Ranks that hold it, ascending.
        combiner: The rank that computes its average; None: the first holder writes it.
        start: Place of its values in the part of each rank, in bytes, if it is averaged.
        reduced_over: As of Box.
    """

    tensor: int
    holders: Sequence[int]
    combiner: int | None
    start: int
    reduced_over: Sequence[int]


class BoxTable:
    """The boxes of a group in the flat buffers of its model.

    Args:
        plan: The job's partition plan.
        ranks: What each rank holds.

    Attributes:
        part_nbytes: Bytes that each rank needs for boxes that are averaged.
        holders: Ranks that hold anything of a tensor, by index in the spec.

    Raises:
        MismatchError: The boxes of a tensor are not the whole tensor.
    """

    def __init__(self, plan: PartitionPlan, ranks: Sequence[SpreadModel]) -> None:
        self._plan = plan
        index_of = {tensor.name: index for index, tensor in enumerate(plan.spec.tensors)}
        holders: dict[Box, list[int]] = {}
        reduced: dict[Box, tuple[int, ...]] = {}
        for rank, model in enumerate(ranks):
            for box in model.boxes:
                key = box._replace(reduced_over=())
                holders.setdefault(key, []).append(rank)
                reduced[key] = reduced.get(key) or box.reduced_over
        self.part_nbytes = averaged = 0
        self.boxes: dict[Box, SharedBox] = {}
        self._known_data_ranks: Sequence[int] = ()
        self.holders: dict[int, set[int]] = {index: set() for index in index_of.values()}
        for key, own in holders.items():
            index, combiner, start = index_of[key.name], None, self.part_nbytes
            self.holders[index].update(own)
            if len(own) > 1 and not reduced[key] and self._has_average(index):
                combiner, averaged = own[averaged % len(own)], averaged + 1
                itemsize = ITEMSIZE[plan.spec.tensors[index].dtype]
                self.part_nbytes += padded(math.prod(key.sizes) * itemsize)
            self.boxes[key] = SharedBox(index, own, combiner, start, reduced[key])
        self._check_complete()

    def _has_average(self, index: int) -> bool:
        tensor = self._plan.spec.tensors[index]
        is_first = tensor.treatment == "first" or tensor.dtype not in FLOATING
        return tensor.role == "trainable" or (tensor.role == "buffer" and not is_first)

    def _check_complete(self) -> None:
        by_index: dict[int, list[Box]] = {}
        for box, shared in self.boxes.items():
            by_index.setdefault(shared.tensor, []).append(box)
        for index, tensor in enumerate(self._plan.spec.tensors):
            boxes = by_index.get(index, [])
            count = sum(math.prod(box.sizes) for box in boxes)
            if count != tensor.size or any(_overlap(*pair) for pair in combinations(boxes, 2)):
                raise MismatchError(
                    f"the ranks of this group do not hold tensor {tensor.name} once: {count} of "
                    f"{tensor.size} elements. Try: device meshes that together have all ranks",
                    "MODEL_MISMATCH",
                )

    def shared(self, box: Box) -> SharedBox:
        """Return what the group knows of a box."""
        return self.boxes[box._replace(reduced_over=())]

    def view(self, memory: memoryview, box: Box) -> Tensor:
        """Return a box of a flat buffer."""
        index = self.shared(box).tensor
        tensor = self._plan.spec.tensors[index]
        view = _typed(memory, *self._plan.extent(index), tensor).view(tensor.shape)
        for dimension, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            view = view.narrow(dimension, start, size)
        return view

    def view_of_part(self, part: memoryview, box: Box) -> Tensor:
        """Return the room for a box that is averaged, in the part of a rank."""
        shared = self.shared(box)
        tensor, start = self._plan.spec.tensors[shared.tensor], shared.start
        nbytes = math.prod(box.sizes) * ITEMSIZE[tensor.dtype]
        return _typed(part, start, start + nbytes, tensor).view(box.sizes)

    def combine(
        self,
        rank: int,
        gradients: memoryview,
        parts: Sequence[memoryview],
        data_ranks: Sequence[int],
        samples: Sequence[int],
    ) -> None:
        """Write the averages that a rank computes into the group's gradient.

        Args:
            rank: The rank.
            gradients: The flat buffer of the group's gradient.
            parts: The parts of all ranks.
            data_ranks: Which part of a batch each rank computes.
            samples: The weight of each rank's values.

        Raises:
            InvalidRequestError: torch does not reduce gradients over all ranks with own data.
        """
        if data_ranks != self._known_data_ranks:
            self._check_reduced(data_ranks)
            self._known_data_ranks = data_ranks
        for box, shared in self.boxes.items():
            if shared.combiner == rank:
                ranks = counted(shared.holders, data_ranks, samples)
                total = sum(weight for _, weight in ranks)
                means = [(self.view_of_part(parts[e], box), weight / total) for e, weight in ranks]
                weighted_mean(self.view(gradients, box), means)

    def _check_reduced(self, data_ranks: Sequence[int]) -> None:
        for box, shared in self.boxes.items():
            reduced = {data_ranks[rank] for rank in shared.reduced_over}
            # a rank in `reduced` may hold nothing of a small tensor
            others = {data_ranks[rank] for rank in self.holders[shared.tensor]} - reduced
            if reduced and others:
                raise InvalidRequestError(
                    f"fully_shard reduces the gradient of {box.name} over the ranks "
                    f"{list(shared.reduced_over)}, and other ranks have data of their own. Try: "
                    "job.batches(..., mesh=...) with the mesh that fully_shard got"
                )


def counted(
    ranks: Sequence[int], data_ranks: Sequence[int], samples: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the ranks that count, with their samples: of those with the same data the lowest.

    Ranks without a sample do not count, unless none has any: then the lowest of all.
    """
    lowest: Mapping[int, int] = {data_ranks[rank]: rank for rank in reversed(ranks)}
    found = [(rank, samples[rank]) for rank in sorted(lowest.values()) if samples[rank]]
    return found or [(ranks[0], 1)]


def weighted_mean(into: Tensor, parts: Sequence[tuple[Tensor, float]]) -> None:
    """Write the sum of the parts, each times its weight. Half precision is summed in float32."""
    if len(parts) == 1:
        into.copy_(parts[0][0])
        return
    exact = torch.promote_types(into.dtype, torch.float32)
    is_direct = into.dtype is exact
    result = into if is_direct else torch.empty_like(into, dtype=exact)
    (first, weight), *others = parts
    torch.mul(first.to(exact), weight, out=result)
    for part, weight in others:
        result.add_(part.to(exact), alpha=weight)
    if not is_direct:
        into.copy_(result)


def _typed(memory: memoryview, start: int, stop: int, tensor: TensorSpec) -> Tensor:
    return tensor_of(memory[start:stop]).view(getattr(torch, tensor.dtype))


def _overlap(one: Box, other: Box) -> bool:
    return all(
        max(start, first) < min(start + size, first + length)
        for start, size, first, length in zip(
            one.offsets, one.sizes, other.offsets, other.sizes, strict=True
        )
    )
