"""What one shard does with pushes besides stepping: averaging, absent tensors, buffers, bad numbers, memory."""

import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pscommon.core.errors import InvalidRequestError, UnsupportedOptimizerError
from pscommon.core.model import ModelSpec, OptimizerSpec
from pscommon.core.tape import Plan
from pscommon.optimizers import SUPPORTED
from psserver.store import Store
from tests.psserver.stores import Plain, Shards, model, noise, one_thread  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")

SGD = OptimizerSpec("sgd", ({"lr": 1.0},))
FLOATING = ["float64", "float32", "float16", "bfloat16"]


def begun(spec: ModelSpec, shards: int = 1, values: dict[str, Tensor] | None = None) -> Shards:
    job = Shards(spec, shards)
    job.begin(noise(spec, 1, roles=("trainable", "buffer", "frozen")) | (values or {}))
    return job


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in ours.keys() | theirs.keys())


# ---- averaging ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_single_push_is_applied_bit_by_bit(dtype: str, shards: int) -> None:
    spec = model(((33, 7), dtype), ((), dtype), ((5,), dtype), optimizer=SGD)
    job = begun(spec, shards)
    before, push = job.weights(), noise(spec, 2)
    job.step(push, samples=[7])

    assert same(job.weights(), {name: before[name] - push[name] for name in before})


def test_pushes_weigh_as_many_samples_as_they_have() -> None:
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
def test_a_mean_needs_samples(samples: list[int]) -> None:
    spec = model(((4,), "float32"), optimizer=SGD)
    job = begun(spec)

    with pytest.raises(ValueError, match="cannot average"):
        job.apply([job.stage(noise(spec, 2)) for _ in samples], samples)


# ---- absent tensors -----------------------------------------------------------------------------------------------

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {"lr": 0.1, "weight_decay": 0.1}),
    ("sgd", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    ("adam", {"lr": 1e-2, "amsgrad": True}),
    ("adamw", {"lr": 1e-2, "weight_decay": 0.1}),
    ("adagrad", {"lr": 1e-2, "lr_decay": 0.1}),
    ("rmsprop", {"lr": 1e-3, "momentum": 0.9, "centered": True, "eps": 1e-2}),
]


def six(name: str, group: dict[str, Any]) -> ModelSpec:
    shapes = [(3,), (40, 3), (), (130,), (7, 7), (64,)]
    return model(
        *((shape, "float64", place % 2) for place, shape in enumerate(shapes)),
        optimizer=OptimizerSpec(name, (group, group | {"lr": group["lr"] / 2})),
    )


def some(values: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Part of the values, another part for each seed."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(len(values), generator=generator) < 0.6
    return {name: value for (name, value), keep in zip(values.items(), kept.tolist(), strict=True) if keep}


@pytest.mark.parametrize(("name", "group"), OPTIMIZERS)
@pytest.mark.parametrize("shards", [1, 3])
def test_without_a_gradient_a_tensor_is_left_alone_as_torch_leaves_it(
    name: str, group: dict[str, Any], shards: int
) -> None:
    spec = six(name, group)
    job = begun(spec, shards)
    plain = Plain(SUPPORTED[name].torch_class, spec, job.weights())
    stepped = dict.fromkeys(plain.weights, 0)
    for step in range(30):
        pushes = [some(noise(spec, 100 * step + worker), 100 * step + worker) for worker in range(step % 3 + 1)]
        plain.step(*pushes)
        job.step(*pushes)
        for tensor in set().union(*pushes):
            stepped[tensor] += 1

    for tensor, weight in job.weights().items():
        torch.testing.assert_close(weight, plain.weights[tensor], rtol=1e-12, atol=1e-12)
    assert len(set(stepped.values())) > 1
    if job.stores[0].state_nbytes:
        assert job.steps() == stepped


def test_parts_of_a_model_may_be_trained_in_turn() -> None:
    spec = six(*OPTIMIZERS[2])
    job = begun(spec, shards=2)
    plain = Plain(torch.optim.Adam, spec, job.weights())
    for step in range(20):
        push = {name: value for name, value in noise(spec, step).items() if int(name[1:]) // 3 == step % 2}
        plain.step(push)
        job.step(push)

    for tensor, weight in job.weights().items():
        torch.testing.assert_close(weight, plain.weights[tensor], rtol=1e-12, atol=1e-12)


def test_a_gradient_missing_in_one_push_counts_as_zero() -> None:
    spec = model(((100,), "float64"), ((9,), "float64"), optimizer=SGD)
    job = begun(spec)
    before, (first, second) = job.weights(), (noise(spec, 2), noise(spec, 3))
    job.step({"t1": first["t1"]}, {"t0": second["t0"]}, samples=[1, 3])

    torch.testing.assert_close(job.weights()["t0"], before["t0"] - 0.75 * second["t0"], rtol=1e-14, atol=0)
    torch.testing.assert_close(job.weights()["t1"], before["t1"] - 0.25 * first["t1"], rtol=1e-14, atol=0)


@pytest.mark.parametrize("index", [-1, 1, 2, 99])
def test_only_trainable_tensors_can_be_absent(index: int) -> None:
    spec = model(((4,), "float32"), ((4,), "float32", "buffer"), ((4,), "float32", "frozen"), optimizer=SGD)

    with pytest.raises(InvalidRequestError, match=f"{index} is not a trainable tensor"):
        Store(Plan(spec, 1), 0).staging(absent=[index])


# ---- hyper-parameters ---------------------------------------------------------------------------------------------


def test_the_first_push_that_brings_hyper_parameters_decides() -> None:
    spec = model(((4,), "float64"), optimizer=SGD)
    job = begun(spec)
    before, push = job.weights()["t0"], noise(spec, 2)
    changed, other = ({**job.stores[0].groups()[0], "lr": lr} for lr in (0.5, 0.25))
    job.apply([job.stage(push), job.stage(push, (changed,)), job.stage(push, (other,))], [1, 2, 1])
    job.step(push)

    torch.testing.assert_close(job.weights()["t0"], before - 0.5 * push["t0"] - 0.5 * push["t0"])
    assert job.stores[0].groups() == (changed,)


@pytest.mark.parametrize("shards", [1, 2])
def test_momentum_may_come_and_go(shards: int) -> None:
    spec = six("sgd", {"lr": 0.1})
    job = begun(spec, shards)
    plain = Plain(torch.optim.SGD, spec, job.weights())
    for step in range(12):
        momentum = 0.0 if step % 6 < 3 else 0.9
        groups = tuple({**group, "momentum": momentum, "dampening": 0.2} for group in job.stores[0].groups())
        push = noise(spec, step)
        plain.step(push, groups=groups)
        job.step(push, groups=groups)

    for tensor, weight in job.weights().items():
        torch.testing.assert_close(weight, plain.weights[tensor], rtol=1e-12, atol=1e-12)


def test_what_an_optimizer_keeps_is_made_when_it_is_needed() -> None:
    spec = model(((64,), "float32"), optimizer=OptimizerSpec("adam", ({},)))
    job = begun(spec)
    store, push = job.stores[0], noise(spec, 2)
    sizes = [store.state_nbytes]
    job.step(push)
    sizes.append(store.state_nbytes)
    job.step(push, groups=({**store.groups()[0], "amsgrad": True},))
    sizes.append(store.state_nbytes)

    assert sizes == [0, 2 * 256, 3 * 256]
    assert store.nbytes == 256


def test_an_unknown_optimizer_is_refused_at_once() -> None:
    spec = model(((4,), "float32"), optimizer=OptimizerSpec("lion", ({},)))

    with pytest.raises(UnsupportedOptimizerError, match=r"'lion'.*sgd, adam"):
        Store(Plan(spec, 1), 0)


# ---- buffers and frozen tensors -----------------------------------------------------------------------------------


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
def test_buffers_are_averaged_and_whole_numbers_are_the_first_contributors(shards: int) -> None:
    spec = with_buffers()
    job = begun(spec, shards)
    one, two = (noise(spec, seed, roles=("trainable", "buffer")) for seed in (2, 3))
    one["t2"], two["t2"] = torch.tensor(5), torch.tensor(9)
    frozen = job.weights()["t5"]
    job.step(one, two, samples=[3, 1])
    after = job.weights()

    torch.testing.assert_close(after["t1"], 0.75 * one["t1"] + 0.25 * two["t1"])
    torch.testing.assert_close(after["t4"], 0.75 * one["t4"] + 0.25 * two["t4"], rtol=1e-14, atol=1e-15)
    assert after["t2"] == 5
    assert torch.equal(after["t3"], one["t3"].bool())
    assert torch.equal(after["t5"], frozen)


def test_a_buffer_that_is_equal_everywhere_never_drifts() -> None:
    spec = with_buffers()
    mask = torch.tensor([0.0, -math.inf, 1.5] * 10)
    constant = torch.randn(9, dtype=torch.float64)
    job = begun(spec, values={"t1": mask, "t4": constant})
    for step in range(20):
        pushes = [noise(spec, step, roles=("trainable", "buffer")) | {"t1": mask, "t4": constant} for _ in range(3)]
        assert not any(job.stores[0].find_non_finite(job.stage(push)[0]) for push in pushes)
        job.step(*pushes)

    assert torch.equal(job.weights()["t1"], mask)
    assert torch.equal(job.weights()["t4"], constant)


def test_views_are_what_a_worker_pulls() -> None:
    spec = with_buffers()
    store = begun(spec).stores[0]
    plan = Plan(spec, 1)
    step, everything = (sum(len(view) for view in store.views(which)) for which in (False, True))

    assert step == plan.section("trainable").nbytes + plan.section("buffer").nbytes
    assert everything == plan.nbytes == store.nbytes
    assert all(view.readonly for view in store.views(True))


# ---- bad numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATING)
def test_a_bad_gradient_is_found_and_named(bad: float, dtype: str) -> None:
    spec = model(((5,), dtype), ((70, 3), dtype), ((), dtype), ((3,), dtype, "buffer"), optimizer=SGD)
    job = begun(spec, shards=3)
    for name, value in noise(spec, 2, roles=("trainable", "buffer")).items():
        push = noise(spec, 2, roles=("trainable", "buffer"))
        push[name].view(-1)[value.numel() // 2] = bad
        found = {store.find_non_finite(part) for store, part in zip(job.stores, job.stage(push), strict=True)}

        assert found == {"", name}


@pytest.mark.parametrize(("dtype", "large"), [("float16", 6e4), ("float32", 3e38), ("float64", 1e308)])
def test_numbers_whose_sum_overflows_are_not_bad(dtype: str, large: float) -> None:
    spec = model(((100,), dtype), optimizer=SGD)
    job = begun(spec)
    (staging,) = job.stage({"t0": torch.full((100,), large, dtype=getattr(torch, dtype))})

    assert job.stores[0].find_non_finite(staging) == ""


def test_what_is_absent_is_not_looked_at() -> None:
    spec = model(((70,), "float32"), ((70,), "float32"), optimizer=SGD)
    job = begun(spec)
    (poisoned,) = job.stage({"t0": torch.full((70,), math.nan), "t1": torch.ones(70)})
    job.stores[0].release(poisoned)
    (staging,) = job.stage({"t1": torch.ones(70)})

    assert job.stores[0].find_non_finite(staging) == ""


def test_a_bad_push_that_is_dropped_changes_nothing() -> None:
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


def test_bad_initial_weights_are_found_but_masks_are_not() -> None:
    spec = with_buffers()
    job = Shards(spec, 1)
    values = noise(spec, 1, roles=("trainable", "buffer", "frozen")) | {"t1": torch.full((30,), -math.inf)}
    (good,) = job.stage(values, initial=True)
    (bad,) = job.stage(values | {"t0": torch.full((5,), math.inf)}, initial=True)

    assert [job.stores[0].find_non_finite(staging) for staging in (good, bad)] == ["", "t0"]


# ---- memory -------------------------------------------------------------------------------------------------------


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_a_released_buffer_is_used_again_and_one_in_use_is_not() -> None:
    store = Store(Plan(with_buffers(), 1), 0)
    first, second = store.staging(), store.staging()
    places = [address(staging.views[0]) for staging in (first, second)]
    store.release(second)
    store.release(second)
    third, fourth = store.staging(), store.staging()

    assert places[0] != places[1]
    assert address(third.views[0]) == places[1]
    assert address(fourth.views[0]) not in places


def test_a_released_staging_cannot_be_applied() -> None:
    job = begun(with_buffers())
    (staging,) = job.stage(noise(with_buffers(), 2, roles=("trainable", "buffer")))
    job.stores[0].release(staging)

    with pytest.raises(ValueError, match="was released"):
        job.stores[0].apply([staging], [1])


def test_a_staging_has_room_for_exactly_what_the_wire_brings() -> None:
    plan = Plan(with_buffers(), 1)
    store = Store(plan, 0)
    sizes = [(s.nbytes, sum(map(len, s.views))) for s in (store.staging(), store.staging([0]), store.staging((), True))]

    step, buffers = plan.section("trainable").nbytes + plan.section("buffer").nbytes, plan.section("buffer").nbytes
    assert sizes == [(step, step), (buffers, buffers), (plan.nbytes, plan.nbytes)]


def test_threads_never_share_a_staging() -> None:
    store = Store(Plan(model(((4096,), "uint8", "buffer"), ((1,), "float32"), optimizer=SGD), 1), 0)
    start, mixed_up = threading.Barrier(4), []

    def work(mark: int) -> None:
        start.wait(timeout=10)
        for _ in range(200):
            staging = store.staging()
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


def test_more_shards_than_bytes_to_share_is_fine() -> None:
    spec = model(((3,), "float32"), ((2,), "float32", "buffer"), optimizer=OptimizerSpec("adam", ({},)))
    few, many = begun(spec), begun(spec, shards=5)
    for step in range(3):
        push = noise(spec, step, roles=("trainable", "buffer"))
        few.step(push)
        many.step(push)

    assert same(few.weights(), many.weights())
    assert [len(store.views(True)) for store in many.stores].count(0) >= 3
