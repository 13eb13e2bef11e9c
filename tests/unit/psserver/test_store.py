"""The store of one shard besides stepping: means, buffers, bad numbers, memory."""

import math
import threading

import numpy as np
import pytest
import torch
from torch import Tensor

from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec, Treatment
from pscommon.core.partition import PartitionPlan
from psserver.parameters.store import ParameterStore
from tests.support.stores import SGD, Shards, begun, model, noise, one_thread  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")

FLOATING = ["float64", "float32", "float16", "bfloat16"]


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in ours.keys() | theirs.keys())


# ---- averaging -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_single_push_is_applied_bit_by_bit(dtype: str, shards: int) -> None:
    spec = model(((33, 7), dtype), ((), dtype), ((5,), dtype), optimizer=SGD)
    job = begun(spec, shards)
    before, push = job.weights(), noise(spec, 2)
    job.step(push, samples=[7])

    assert same(job.weights(), {name: before[name] - push[name] for name in before})


def test_pushes_are_weighted_by_their_samples() -> None:
    spec = model(((4,), "float64"), ((3, 3), "float64"), optimizer=SGD)
    job = begun(spec, shards=2)
    before, (one, two, three) = job.weights(), (noise(spec, seed) for seed in (2, 3, 4))
    job.step(one, two, three, samples=[1, 2, 5])
    after = job.weights()

    for name, weight in before.items():
        mean = (one[name] + 2 * two[name] + 5 * three[name]) / 8
        torch.testing.assert_close(after[name], weight - mean, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_means_are_rounded_once(dtype: str) -> None:
    spec = model(((1000,), dtype), optimizer=SGD)
    job = begun(spec, values={"t0": torch.zeros(1000, dtype=getattr(torch, dtype))})
    pushes = [noise(spec, seed) for seed in range(5)]
    job.step(*pushes)
    exact = torch.stack([push["t0"].double() for push in pushes]).mean(0)
    error = (job.weights()["t0"].double() + exact).abs() / exact.abs()

    assert float(error.max()) <= torch.finfo(getattr(torch, dtype)).eps / 2 * 1.001


@pytest.mark.parametrize("samples", [[], [0], [3, 0]])
def test_a_mean_without_samples_is_refused(samples: list[int]) -> None:
    spec = model(((4,), "float32"), optimizer=SGD)
    job = begun(spec)

    with pytest.raises(ValueError, match="cannot average"):
        job.apply([job.stage(noise(spec, 2)) for _ in samples], samples)


# ---- buffers and frozen tensors ------------------------------------------------------------------


def with_buffers() -> ModelSpec:
    return model(
        ((5,), "float32"),
        ((30,), "float32", "buffer"),
        ((), "int64", "buffer"),
        ((3,), "bool", "buffer"),
        ((9,), "float64", "buffer"),
        ((40,), "float32", "frozen"),
        optimizer=SGD,
    )


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_buffers_are_averaged_and_integers_come_from_the_first_contributor(shards: int) -> None:
    spec = with_buffers()
    job = begun(spec, shards)
    one, two = (noise(spec, seed, roles=("trainable", "buffer")) for seed in (2, 3))
    one["t2"], two["t2"] = torch.tensor(5), torch.tensor(9)
    frozen = job.weights()["t5"]
    job.step(one, two, samples=[3, 1])
    after = job.weights()

    torch.testing.assert_close(after["t1"], 0.75 * one["t1"] + 0.25 * two["t1"])
    torch.testing.assert_close(
        after["t4"], 0.75 * one["t4"] + 0.25 * two["t4"], rtol=1e-14, atol=1e-15
    )
    assert after["t2"] == 5
    assert torch.equal(after["t3"], one["t3"].bool())
    assert torch.equal(after["t5"], frozen)


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_each_buffer_gets_its_treatment(shards: int) -> None:
    """Treatments alternate, and a shard has parts of several tensors."""
    treatments: tuple[Treatment | None, ...] = ("first", "average", None) * 4
    tensors = [
        TensorSpec(f"t{number}", (37,), dtype, "buffer", treatment=treatment)
        for number, treatment in enumerate(treatments)
        for dtype in [("float32", "bfloat16")[number % 2]]
    ]
    job = begun(ModelSpec((TensorSpec("w", (5,), "float32"), *tensors), SGD), shards)
    pushes = [noise(job.plan.spec, seed, roles=("trainable", "buffer")) for seed in (2, 3, 4)]
    job.step(*pushes, samples=[3, 2, 3])
    after = job.weights()

    for tensor in tensors:
        one, two, three = (push[tensor.name] for push in pushes)
        if tensor.treatment == "first":
            assert torch.equal(after[tensor.name], one)
        else:
            mean = (3 * one.double() + 2 * two.double() + 3 * three.double()) / 8
            torch.testing.assert_close(after[tensor.name], mean.to(one.dtype))


def test_equal_buffers_never_drift() -> None:
    spec = with_buffers()
    mask = torch.tensor([0.0, -math.inf, 1.5] * 10)
    constant = torch.randn(9, dtype=torch.float64)
    job = begun(spec, values={"t1": mask, "t4": constant})
    for step in range(20):
        pushes = [
            noise(spec, step, roles=("trainable", "buffer")) | {"t1": mask, "t4": constant}
            for _ in range(3)
        ]
        assert not any(job.stores[0].find_non_finite(job.stage(push)[0]) for push in pushes)
        job.step(*pushes)

    assert torch.equal(job.weights()["t1"], mask)
    assert torch.equal(job.weights()["t4"], constant)


def test_views_are_what_a_worker_pulls() -> None:
    spec = with_buffers()
    store = begun(spec).stores[0]
    plan = PartitionPlan(spec, 1)
    step, everything = (
        sum(len(view) for view in store.read(everything=which).views()) for which in (False, True)
    )

    assert step == plan.section("trainable").nbytes + plan.section("buffer").nbytes
    assert everything == plan.nbytes == store.nbytes
    assert all(view.readonly for view in store.read(everything=True).views())


# ---- bad numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATING)
def test_a_bad_gradient_is_found_and_named(bad: float, dtype: str) -> None:
    spec = model(
        ((5,), dtype), ((70, 3), dtype), ((), dtype), ((3,), dtype, "buffer"), optimizer=SGD
    )
    job = begun(spec, shards=3)
    for name, value in noise(spec, 2, roles=("trainable", "buffer")).items():
        push = noise(spec, 2, roles=("trainable", "buffer"))
        push[name].view(-1)[value.numel() // 2] = bad
        found = {
            store.find_non_finite(part)
            for store, part in zip(job.stores, job.stage(push), strict=True)
        }

        assert found == {"", name}


@pytest.mark.parametrize(
    ("dtype", "large"), [("float16", 6e4), ("float32", 3e38), ("float64", 1e308)]
)
def test_finite_numbers_with_an_overflowing_sum_are_not_bad(dtype: str, large: float) -> None:
    spec = model(((100,), dtype), optimizer=SGD)
    job = begun(spec)
    (staging,) = job.stage({"t0": torch.full((100,), large, dtype=getattr(torch, dtype))})

    assert job.stores[0].find_non_finite(staging) == ""


def test_absent_tensors_are_not_checked() -> None:
    spec = model(((70,), "float32"), ((70,), "float32"), optimizer=SGD)
    job = begun(spec)
    (poisoned,) = job.stage({"t0": torch.full((70,), math.nan), "t1": torch.ones(70)})
    job.stores[0].release(poisoned)
    (staging,) = job.stage({"t1": torch.ones(70)})

    assert job.stores[0].find_non_finite(staging) == ""


def test_a_dropped_bad_push_changes_nothing() -> None:
    spec = with_buffers()
    job, untouched = begun(spec), begun(spec)
    for step in range(3):
        push = noise(spec, step, roles=("trainable", "buffer"))
        (bad,) = job.stage(push | {"t0": torch.full((5,), math.nan)}, groups=({"lr": 9.0},))
        assert job.stores[0].find_non_finite(bad) == "t0"
        job.stores[0].release(bad)
        job.step(push)
        untouched.step(push)

    assert same(job.weights(), untouched.weights())
    assert job.stores[0].groups() == untouched.stores[0].groups()


def test_bad_initial_weights_are_found_except_in_masks() -> None:
    spec = with_buffers()
    job = Shards(spec, 1)
    values = noise(spec, 1, roles=("trainable", "buffer", "frozen")) | {
        "t1": torch.full((30,), -math.inf)
    }
    (good,) = job.stage(values, initial=True)
    (bad,) = job.stage(values | {"t0": torch.full((5,), math.inf)}, initial=True)

    assert [job.stores[0].find_non_finite(staging) for staging in (good, bad)] == ["", "t0"]


# ---- memory --------------------------------------------------------------------------------------


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_a_released_buffer_is_reused_and_one_in_use_is_not() -> None:
    store = ParameterStore(PartitionPlan(with_buffers(), 1), 0)
    first, second = store.allocate_staging(), store.allocate_staging()
    places = [address(staging.views[0]) for staging in (first, second)]
    store.release(second)
    store.release(second)
    third, fourth = store.allocate_staging(), store.allocate_staging()

    assert places[0] != places[1]
    assert address(third.views[0]) == places[1]
    assert address(fourth.views[0]) not in places


def test_a_released_staging_cannot_be_applied() -> None:
    job = begun(with_buffers())
    (staging,) = job.stage(noise(with_buffers(), 2, roles=("trainable", "buffer")))
    job.stores[0].release(staging)

    with pytest.raises(ValueError, match="was released"):
        job.stores[0].apply([staging], [1])


def test_a_staging_has_exactly_the_size_of_the_received_bytes() -> None:
    plan = PartitionPlan(with_buffers(), 1)
    store = ParameterStore(plan, 0)
    sizes = [
        (s.nbytes, sum(map(len, s.views)))
        for s in (
            store.allocate_staging(),
            store.allocate_staging([0]),
            store.allocate_staging((), True),
        )
    ]

    step, buffers = (
        plan.section("trainable").nbytes + plan.section("buffer").nbytes,
        plan.section("buffer").nbytes,
    )
    assert sizes == [(step, step), (buffers, buffers), (plan.nbytes, plan.nbytes)]


def test_threads_never_share_a_staging() -> None:
    store = ParameterStore(
        PartitionPlan(model(((4096,), "uint8", "buffer"), ((1,), "float32"), optimizer=SGD), 1), 0
    )
    start, mixed_up = threading.Barrier(4), []

    def work(mark: int) -> None:
        start.wait(timeout=10)
        for _ in range(200):
            staging = store.allocate_staging()
            for view in staging.views:
                np.frombuffer(view, np.uint8)[:] = mark
            if any((np.frombuffer(view, np.uint8) != mark).any() for view in staging.views):
                mixed_up.append(mark)
            store.release(staging)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    assert mixed_up == []


def test_more_shards_than_bytes_are_allowed() -> None:
    spec = model(
        ((3,), "float32"), ((2,), "float32", "buffer"), optimizer=OptimizerSettings("adam", ({},))
    )
    few, many = begun(spec), begun(spec, shards=5)
    for step in range(3):
        push = noise(spec, step, roles=("trainable", "buffer"))
        few.step(push)
        many.step(push)

    assert same(few.weights(), many.weights())
    assert [len(store.read(everything=True).views()) for store in many.stores].count(0) >= 3
