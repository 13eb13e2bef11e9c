"""The boxes of a model that is spread over the ranks of a group, in its flat buffers."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pscommon.core.errors import InvalidRequestError, MismatchError
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from pscommon.core.partition import PartitionPlan
from psworker.group.boxes import Box, BoxTable, SpreadModel, counted, merged
from psworker.model.flat_buffer import tensor_of

SGD = OptimizerSettings("SGD")
VALUES = torch.arange(35.0).view(5, 7)


def plan_of(*tensors: TensorSpec) -> PartitionPlan:
    return PartitionPlan(ModelSpec(tensors, SGD), 2)


def memory_of(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


def tensor_in(plan: PartitionPlan, memory: memoryview, index: int) -> Tensor:
    tensor = plan.spec.tensors[index]
    start, stop = plan.extent(index)
    return tensor_of(memory[start:stop]).view(torch.float32).view(tensor.shape)


LAYOUTS = {
    "uneven rows": [[Box("w", (0, 0), (3, 7))], [Box("w", (3, 0), (2, 7))]],
    "a rank without a row": [
        [Box("w", (first, 0), (size, 7))] if size else []
        for first, size in ((0, 2), (2, 2), (4, 1), (5, 0))
    ],
    "columns": [[Box("w", (0, 0), (5, 4))], [Box("w", (0, 4), (5, 3))]],
    "two dimensions": [
        [Box("w", (row, column), (rows, columns))]
        for row, rows in ((0, 3), (3, 2))
        for column, columns in ((0, 4), (4, 3))
    ],
    "replicated": [[Box("w", (0, 0), (5, 7))]] * 3,
    "replicated columns": [[Box("w", (0, 0), (5, 4))], [Box("w", (0, 4), (5, 3))]] * 2,
}


def part(value: Tensor, box: Box) -> Tensor:
    return value[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]


@pytest.mark.parametrize("is_reduced", [False, True], ids=["own", "reduced"])
@pytest.mark.parametrize("ranks", LAYOUTS.values(), ids=LAYOUTS)
def test_the_boxes_of_all_ranks_make_the_gradient(
    ranks: Sequence[Sequence[Box]], is_reduced: bool
) -> None:
    """Reduced boxes are those of the lowest rank; others are averaged, weighted by samples."""
    reduced = tuple(range(len(ranks))) if is_reduced else ()
    plan = plan_of(TensorSpec("other", (3,), "float32"), TensorSpec("w", (5, 7), "float32"))
    table = BoxTable(
        plan,
        [
            SpreadModel(
                [
                    Box("other", (0,), (3,), reduced),
                    *(b._replace(reduced_over=reduced) for b in own),
                ],
                2,
            )
            for own in ranks
        ],
    )
    gradients = memory_of(plan.nbytes)
    parts = [memory_of(table.part_nbytes) for _ in ranks]
    samples = [1 + rank for rank in range(len(ranks))]
    for rank, own in enumerate(ranks):
        for box in own:
            shared, value = table.shared(box), part(VALUES, box) * (rank + 1)
            if shared.combiner is not None:
                table.view_of_part(parts[rank], box).copy_(value)
            elif shared.holders[0] == rank:
                table.view(gradients, box).copy_(value)
    for rank in range(len(ranks)):
        table.combine(rank, gradients, parts, range(len(ranks)), samples)

    expected = torch.zeros(5, 7)
    for box in dict.fromkeys(box for own in ranks for box in own):
        holders = [rank for rank, own in enumerate(ranks) if box in own]
        weights = [samples[rank] for rank in holders]
        mean = sum((r + 1) * w for r, w in zip(holders, weights, strict=True)) / sum(weights)
        part(expected, box).copy_(part(VALUES, box) * (holders[0] + 1 if is_reduced else mean))
    torch.testing.assert_close(tensor_in(plan, gradients, 1), expected)
    assert not tensor_in(plan, gradients, 0).any(), "nothing was written for it"


def test_tensors_without_an_average_need_no_memory() -> None:
    plan = plan_of(TensorSpec("w", (5, 7), "float32"))
    for ranks in (LAYOUTS["uneven rows"], LAYOUTS["two dimensions"]):
        assert BoxTable(plan, [SpreadModel(own, 1) for own in ranks]).part_nbytes == 0


@pytest.mark.parametrize(
    "ranks",
    [
        [[Box("w", (0, 0), (3, 7))], [Box("w", (3, 0), (1, 7))]],
        [[Box("w", (0, 0), (3, 7))], [Box("w", (2, 0), (2, 7))]],
        [[Box("w", (0, 0), (5, 7))], [Box("w", (0, 0), (3, 7))]],
        [[], []],
    ],
    ids=["too few", "overlapping", "whole and part", "none"],
)
def test_boxes_that_are_not_the_whole_tensor_are_refused(
    ranks: Sequence[Sequence[Box]],
) -> None:
    with pytest.raises(MismatchError, match="do not hold tensor w once") as caught:
        BoxTable(plan_of(TensorSpec("w", (5, 7), "float32")), [SpreadModel(o, 1) for o in ranks])
    assert caught.value.reason == "MODEL_MISMATCH"


def test_a_reduction_that_leaves_out_data_is_refused() -> None:
    """Ranks 0 and 1 reduce, and so do 2 and 3: that is right only if rank 2 has rank 0's data."""
    plan = plan_of(TensorSpec("w", (4,), "float32"))
    ranks = [
        SpreadModel([Box("w", (2 * (rank % 2),), (2,), ranks_of)], 1)
        for rank, ranks_of in enumerate([(0, 1), (0, 1), (2, 3), (2, 3)])
    ]
    table = BoxTable(plan, ranks)
    gradients, parts = memory_of(plan.nbytes), [memory_of(0)] * 4
    table.combine(0, gradients, parts, [0, 1, 0, 1], [1] * 4)
    with pytest.raises(InvalidRequestError, match="over the ranks"):
        table.combine(0, gradients, parts, [0, 1, 2, 3], [1] * 4)


def test_of_ranks_with_the_same_data_the_lowest_counts() -> None:
    assert counted([0, 1, 2, 3], [0, 0, 1, 1], [3, 3, 2, 2]) == [(0, 3), (2, 2)]
    assert counted([1, 3], [0, 0, 1, 1], [3, 3, 2, 2]) == [(1, 3), (3, 2)]
    assert counted([0, 1], [0, 1], [0, 4]) == [(1, 4)]
    assert counted([0, 1], [0, 1], [0, 0]) == [(0, 1)]


def tensors(*names: str, role: str = "trainable") -> list[TensorSpec]:
    return [TensorSpec(name, (2,), "float32", role) for name in names]  # type: ignore[arg-type]


def test_stages_make_the_model_in_its_order() -> None:
    """Parameters come first, then buffers; the stage counts, not the rank."""
    last = ModelSpec((*tensors("c", "d"), *tensors("d_mean", role="buffer")), SGD)
    first = ModelSpec((*tensors("a"), *tensors("a_mean", role="buffer")), SGD)
    model = merged([last, first], [SpreadModel([], 2, stage=1), SpreadModel([], 1, stage=0)])

    assert [tensor.name for tensor in model.tensors] == ["a", "c", "d", "a_mean", "d_mean"]


def test_a_name_on_two_stages_is_refused() -> None:
    stages = [ModelSpec(tuple(tensors("0.weight")), SGD) for _ in range(2)]
    with pytest.raises(MismatchError, match=r"0\.weight is on the pipeline stages 0 and 1"):
        merged(stages, [SpreadModel([], 1, stage=stage) for stage in range(2)])

    assert len(merged(stages, [SpreadModel([], 1, stage=0)] * 2).tensors) == 1, "a replica"


def test_ranks_that_describe_a_tensor_differently_are_refused() -> None:
    specs = [ModelSpec((TensorSpec("w", shape, "float32"),), SGD) for shape in ((2,), (3,))]
    with pytest.raises(MismatchError, match=r"float32\[2\] trainable and float32\[3\]"):
        merged(specs, [SpreadModel([], 1)] * 2)

    other = ModelSpec(specs[0].tensors, OptimizerSettings("Adam"))
    with pytest.raises(MismatchError, match="different optimizers"):
        merged([specs[0], other], [SpreadModel([], 1)] * 2)
