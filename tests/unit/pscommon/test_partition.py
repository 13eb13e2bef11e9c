"""The partition of the flat buffer is balanced, complete and the same on every machine."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pscommon.core.model_spec import ROLES, ModelSpec, OptimizerSettings, TensorSpec, Treatment
from pscommon.core.partition import (
    ALIGNMENT_BYTES,
    PIECE_COUNT,
    ByteRange,
    PartitionPlan,
    piece_nbytes,
)
from tests.support import architectures
from tests.support.architectures import Shapes

ROOT = Path(__file__).parents[3]

ARCHITECTURES: dict[str, tuple[Callable[[], Shapes], int]] = {
    "resnet50": (architectures.resnet50, 25_557_032),
    "vgg16": (architectures.vgg16, 138_357_544),
    "gpt2": (architectures.gpt2_small, 124_439_808),
}

DTYPES = st.sampled_from(["float64", "float32", "float16", "bfloat16"])
KINDS = st.one_of(
    st.tuples(DTYPES, st.just("trainable"), st.integers(0, 1)),
    st.tuples(
        st.one_of(DTYPES, st.sampled_from(["int64", "bool"])),
        st.sampled_from(["buffer", "frozen"]),
        st.just(0),
    ),
)
SHAPES = st.lists(st.integers(0, 30), max_size=3).map(tuple)


@st.composite
def plans(draw: st.DrawFn) -> PartitionPlan:
    drawn = draw(st.lists(st.tuples(SHAPES, KINDS), min_size=1, max_size=8))
    tensors = [TensorSpec(f"t{number}", shape, *kind) for number, (shape, kind) in enumerate(drawn)]
    return PartitionPlan(
        ModelSpec(tuple(tensors), OptimizerSettings("sgd", ({}, {}))), draw(st.integers(1, 9))
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_shards_of_real_models_are_balanced(name: str) -> None:
    make, parameters = ARCHITECTURES[name]
    spec = architectures.model(make())
    assert sum(t.size for t in spec.tensors if t.role == "trainable") == parameters

    for shards in range(2, 17):
        sizes = [PartitionPlan(spec, shards).shard_nbytes(shard) for shard in range(shards)]

        assert max(sizes) * shards / sum(sizes) <= 1.05


def test_large_tensors_are_split_and_small_ones_packed() -> None:
    plan = PartitionPlan(architectures.model(architectures.vgg16()), 4)
    tensors = [
        [s.tensor for s in plan.slices(plan.range(shard, "trainable"))] for shard in range(4)
    ]
    largest = max(range(len(plan.spec.tensors)), key=lambda index: plan.spec.tensors[index].size)

    assert sum(largest in shard for shard in tensors) > 1
    assert len(tensors[0]) > 20


@given(plans())
def test_every_byte_has_one_shard_and_shards_have_even_sizes(plan: PartitionPlan) -> None:
    pieces: dict[int, list[tuple[int, int]]] = {
        index: [] for index in range(len(plan.spec.tensors))
    }
    for shard in range(plan.shards):
        for role in ROLES:
            for piece in plan.slices(plan.range(shard, role)):
                pieces[piece.tensor].append((piece.start, piece.stop))

    for index, found in pieces.items():
        start, stop = plan.extent(index)
        assert start % ALIGNMENT_BYTES == 0
        assert [a for a, _ in found[1:]] == [b for _, b in found[:-1]]
        assert (found[0][0], found[-1][1]) == (start, stop) if found else start == stop
    for role in ROLES:
        sizes = [plan.range(shard, role).nbytes for shard in range(plan.shards)]
        assert max(sizes) - min(sizes) <= ALIGNMENT_BYTES


@given(plans())
def test_tensors_do_not_overlap(plan: PartitionPlan) -> None:
    extents = sorted(
        plan.extent(index)
        for index in range(len(plan.spec.tensors))
        if plan.spec.tensors[index].nbytes
    )

    assert all(before.stop <= after.start for before, after in pairwise(extents))
    assert all(extent.stop <= plan.nbytes for extent in extents)


@given(plans())
def test_segments_are_runs_of_one_dtype_and_group(plan: PartitionPlan) -> None:
    for shard in range(plan.shards):
        span = plan.range(shard, "trainable")
        segments = plan.segments(span)

        assert sum(s.stop - s.start for s in segments) == span.nbytes
        for tensor_slice in plan.slices(span):
            tensor = plan.spec.tensors[tensor_slice.tensor]
            assert [
                (s.dtype, s.group)
                for s in segments
                if s.start <= tensor_slice.start and tensor_slice.stop <= s.stop
            ] == [(tensor.dtype, tensor.group)]


@given(plans(), st.data())
def test_without_removes_whole_tensors(plan: PartitionPlan, data: st.DataObject) -> None:
    trainable = [
        index for index, tensor in enumerate(plan.spec.tensors) if tensor.role == "trainable"
    ]
    absent = data.draw(st.sets(st.sampled_from(trainable))) if trainable else set()
    span = plan.range(data.draw(st.integers(0, plan.shards - 1)), "trainable")
    holes = [plan.extent(index) for index in absent]

    def remaining(block: int) -> bool:
        return not any(start <= block < stop for start, stop in holes)

    blocks = [block for block in range(span.start, span.stop, ALIGNMENT_BYTES) if remaining(block)]

    assert [
        b for start, stop in plan.without(span, absent) for b in range(start, stop, ALIGNMENT_BYTES)
    ] == blocks


BASE = (
    TensorSpec("a", (3, 5), "float32"),
    TensorSpec("b", (7,), "float32"),
    TensorSpec("c", (2,), "float32", "buffer"),
)
OTHERS: dict[str, tuple[TensorSpec, ...]] = {
    "name": (replace(BASE[0], name="z"), *BASE[1:]),
    "shape of the same size": (replace(BASE[0], shape=(5, 3)), *BASE[1:]),
    "dtype of the same size": (replace(BASE[0], dtype="float16", shape=(3, 10)), *BASE[1:]),
    "role": (*BASE[:2], replace(BASE[2], role="frozen")),
    "group": (BASE[0], replace(BASE[1], group=1), BASE[2]),
    "order": (BASE[1], BASE[0], BASE[2]),
    "one less": BASE[:2],
}


def digest(tensors: tuple[TensorSpec, ...], shards: int = 2) -> str:
    return PartitionPlan(ModelSpec(tensors, OptimizerSettings("sgd", ({}, {}))), shards).digest


@pytest.mark.parametrize("what", OTHERS)
def test_another_partition_has_another_digest(what: str) -> None:
    assert digest(OTHERS[what]) != digest(BASE)


def test_digests_are_the_same_on_every_machine_and_differ_by_shards() -> None:
    assert len({digest(BASE, shards) for shards in range(1, 9)}) == 8

    code = (
        "from tests.support.architectures import *; from pscommon.core.partition import "
        "PartitionPlan; print(PartitionPlan(model(resnet50()), 5).digest)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "common")])}
    other = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )

    assert (
        other.stdout.strip()
        == PartitionPlan(architectures.model(architectures.resnet50()), 5).digest
    )


def test_with_more_shards_than_tensors_some_have_no_bytes() -> None:
    plan = PartitionPlan(
        ModelSpec((TensorSpec("w", (3,), "float32"),), OptimizerSettings("sgd")), 4
    )
    ranges = [plan.range(shard, "trainable") for shard in range(4)]

    assert sorted(r.nbytes for r in ranges) == [0, 0, 0, 64]
    assert [list(plan.slices(r)) for r in ranges if r.nbytes] == [[(0, 0, 12)]]


def test_a_job_without_shards_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one shard"):
        PartitionPlan(ModelSpec(BASE, OptimizerSettings("sgd")), 0)


def test_absent_tensors_at_the_edges_of_a_range() -> None:
    plan = PartitionPlan(
        ModelSpec(
            tuple(TensorSpec(f"t{i}", (16,), "float32") for i in range(4)), OptimizerSettings("sgd")
        ),
        1,
    )
    full_range = plan.range(0, "trainable")

    assert plan.without(full_range, {0, 3}) == [ByteRange(64, 192)]
    assert plan.without(full_range, {1}) == [ByteRange(0, 64), ByteRange(128, 256)]
    assert plan.without(full_range, {0, 1, 2, 3}) == []
    assert plan.without(ByteRange(64, 128), {0, 3}) == [ByteRange(64, 128)]


def test_pieces_are_a_small_part_of_the_buffer_within_size_bounds() -> None:
    sizes = [piece_nbytes(nbytes) for nbytes in (0, 1 << 20, 4 << 20, 1 << 30)]

    assert sizes == [64 << 10, 64 << 10, (4 << 20) // PIECE_COUNT, 1 << 20]


def test_buffers_of_one_treatment_are_adjacent() -> None:
    """Treatments that are not set place the tensors as those of earlier releases."""
    treatments: tuple[Treatment | None, ...] = ("first", "average", "first", None)
    tensors = tuple(
        TensorSpec(f"t{number}", (16,), "float32", "buffer", treatment=treatment)
        for number, treatment in enumerate(treatments)
    )
    plan = PartitionPlan(ModelSpec(tensors, OptimizerSettings("sgd")), 1)

    assert plan.order == (1, 3, 0, 2)
    assert [
        (each.start, each.stop, each.is_first) for each in plan.segments(plan.section("buffer"))
    ] == [
        (0, 128, False),
        (128, 256, True),
    ]
    unset = tuple(replace(tensor, treatment=None) for tensor in tensors)
    assert PartitionPlan(ModelSpec(unset, OptimizerSettings("sgd")), 1).order == (0, 1, 2, 3)
