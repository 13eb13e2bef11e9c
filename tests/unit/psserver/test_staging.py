"""Gradients are checked while they arrive: NaN and Inf are found early and never hidden."""

import math

import pytest
import torch
from torch import Tensor

from pscommon.core.errors import InvalidRequestError
from pscommon.core.model_spec import ModelSpec
from pscommon.core.partition import ByteRange
from pscommon.wire.push import Part
from psserver.parameters.staging import Staging
from psserver.parameters.store import ParameterStore
from tests.support.stores import SGD, begun, fill, model, noise, one_thread  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = ["float64", "float32", "float16", "bfloat16"]
BAD = [math.nan, math.inf, -math.inf]


def staging_of(dtype: str) -> ModelSpec:
    """Return a staging buffer of two gradients of 64 elements without padding, and a buffer."""
    return model(((64,), dtype), ((64,), dtype), ((64,), dtype, "buffer"), optimizer=SGD)


def arrived(
    store: ParameterStore, values: list[Tensor], piece: int, absent: tuple[int, ...] = ()
) -> Staging:
    """Return a push that arrived in pieces of this size, each checked on arrival."""
    staging = store.allocate_staging(absent)
    wire = b"".join(value.view(torch.uint8).numpy().tobytes() for value in values)
    fill(staging.views, iter([wire]))
    for upto in [*range(0, len(wire), piece), len(wire)]:
        staging.mark_filled(upto)
    return staging


def ones(dtype: str, count: int = 3) -> list[Tensor]:
    return [torch.ones(64, dtype=getattr(torch, dtype)) for _ in range(count)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("piece", [1, 7, 128, 10_000])
def test_good_gradients_are_known_when_the_last_byte_arrives(dtype: str, piece: int) -> None:
    store = begun(staging_of(dtype)).stores[0]
    staging = arrived(store, ones(dtype), piece)

    assert staging.gradients_are_finite
    assert store.find_non_finite(staging) == ""


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 31, 32, 63])
def test_a_bad_number_is_found_at_any_position(bad: float, dtype: str, place: int) -> None:
    store = begun(staging_of(dtype)).stores[0]
    for tensor in (0, 1, 2):
        for piece in (1, 64, 100, 10_000):
            values = ones(dtype)
            values[tensor][place] = bad
            staging = arrived(store, values, piece)

            assert staging.gradients_are_finite is (tensor == 2)
            assert store.find_non_finite(staging) == f"t{tensor}"


def test_a_bad_number_is_found_before_the_rest_arrives() -> None:
    store = begun(staging_of("float32")).stores[0]
    staging = store.allocate_staging()
    torch.frombuffer(staging.views[0], dtype=torch.float32).fill_(1.0)[3] = math.nan
    staging.mark_filled(64)
    torch.frombuffer(staging.views[0], dtype=torch.float32).fill_(1.0)
    staging.mark_filled(768)

    assert not staging.gradients_are_finite


@pytest.mark.parametrize("upto", [0, 4, 508])
def test_a_gradient_is_not_known_to_be_good_before_its_last_byte(upto: int) -> None:
    staging = begun(staging_of("float32")).stores[0].allocate_staging()
    torch.frombuffer(staging.views[0], dtype=torch.float32).fill_(1.0)
    staging.mark_filled(upto)
    assert not staging.gradients_are_finite
    staging.mark_filled(512)

    assert staging.gradients_are_finite


def test_checked_bytes_are_not_read_again() -> None:
    """The second pass over a large push would cost as much as the update."""
    store = begun(staging_of("float32")).stores[0]
    staging = arrived(store, ones("float32"), 100)
    torch.frombuffer(staging.views[0], dtype=torch.float32)[5] = math.nan

    assert store.find_non_finite(staging) == ""


@pytest.mark.parametrize("piece", [64, 10_000])
def test_infinities_that_cancel_are_found(piece: int) -> None:
    store = begun(staging_of("float32")).stores[0]
    values = ones("float32")
    values[1][7], values[1][50] = math.inf, -math.inf

    assert store.find_non_finite(arrived(store, values, piece)) == "t1"


@pytest.mark.parametrize(
    ("dtype", "large"), [("float16", 6e4), ("float32", 3e38), ("float64", 1e308)]
)
def test_an_overflowing_sum_is_not_bad_and_hides_no_bad_number(dtype: str, large: float) -> None:
    store = begun(staging_of(dtype)).stores[0]
    values = ones(dtype)
    values[0].fill_(large)
    good = arrived(store, values, 10_000)
    assert not good.gradients_are_finite
    assert store.find_non_finite(good) == ""
    values[1][63] = math.nan

    assert store.find_non_finite(arrived(store, values, 10_000)) == "t1"


@pytest.mark.parametrize("bad", BAD)
def test_all_of_several_dtypes_are_checked(bad: float) -> None:
    spec = model(((64,), "float32"), ((64,), "float16"), ((64,), "float64"), optimizer=SGD)
    job = begun(spec)
    assert [job.stores[0].find_non_finite(staging) for staging in job.stage(noise(spec, 2))] == [""]
    for tensor in ("t0", "t1", "t2"):
        push = noise(spec, 2)
        push[tensor][-1] = bad
        (staging,) = job.stage(push)
        staging.mark_filled(staging.nbytes)

        assert not staging.gradients_are_finite
        assert job.stores[0].find_non_finite(staging) == tensor


@pytest.mark.parametrize("bad", BAD)
def test_present_tensors_are_checked_beside_absent_ones(bad: float) -> None:
    store = begun(staging_of("float32")).stores[0]
    poisoned = store.allocate_staging()
    for view in poisoned.views:
        view[:] = b"\xff" * len(view)
    store.release(poisoned)
    good, spoiled = ones("float32", 2), ones("float32", 2)
    spoiled[0][63] = bad

    assert store.find_non_finite(arrived(store, good, 100, absent=(0,))) == ""
    assert store.find_non_finite(arrived(store, spoiled, 100, absent=(0,))) == "t1"


@pytest.mark.parametrize("absent", [[2], [3], [-1]])
def test_only_trainable_tensors_can_be_absent(absent: list[int]) -> None:
    store = begun(staging_of("float32")).stores[0]
    with pytest.raises(InvalidRequestError, match="is not a trainable tensor"):
        store.allocate_staging(absent)


def test_a_shard_without_gradients_has_only_good_ones() -> None:
    spec = model(((4,), "float32", "buffer"), optimizer=SGD)
    store = begun(spec).stores[0]
    staging = store.allocate_staging()
    staging.mark_filled(staging.nbytes)
    torch.frombuffer(staging.views[0], dtype=torch.float32).fill_(1.0)

    assert store.find_non_finite(staging) == ""


def test_a_released_staging_holds_no_memory() -> None:
    staging = begun(staging_of("float32")).stores[0].allocate_staging()

    assert staging.release() is not None
    assert staging.release() is None
    assert staging.views == []


def test_a_bad_number_is_found_whatever_the_order_of_the_parts() -> None:
    store = begun(staging_of("float32")).stores[0]
    first, second = ByteRange(0, 256), ByteRange(256, 512)
    parts = [Part((second,)), Part((ByteRange(512, 768), first))]
    staging = store.allocate_staging(parts=parts)
    values = ones("float32")
    values[0][3] = math.nan
    wire = b"".join(values[index].numpy().tobytes() for index in (1, 2, 0))
    fill(staging.views, iter([wire]))
    staging.mark_filled(len(wire))

    assert not staging.gradients_are_finite
    assert store.find_non_finite(staging) == "t0"
    assert b"".join(staging.contents) == wire


@pytest.mark.parametrize(
    ("ranges", "problem"),
    [
        ([(0, 256)], "have bytes 256 to 512 once"),
        ([(0, 512)], "have bytes 512 to 768 once"),
        ([(0, 512), (512, 768), (256, 512)], "have bytes 512 to 768 once"),
        ([(0, 768)], "have bytes 0 to 512 once"),
        ([(0, 512), (512, 1024)], "have bytes 512 to 768 once"),
        ([(0, 512), (512, 768), (768, 832)], "not have bytes 768 to 832"),
    ],
)
def test_named_parts_have_each_byte_once(ranges: list[tuple[int, int]], problem: str) -> None:
    store = begun(staging_of("float32")).stores[0]
    parts = [Part(tuple(ByteRange(*bounds) for bounds in ranges))]
    with pytest.raises(InvalidRequestError, match=problem):
        store.allocate_staging(parts=parts)
