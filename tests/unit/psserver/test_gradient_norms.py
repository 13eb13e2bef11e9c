"""The norm of a round's mean equals torch's, with the same bits for any number of threads."""

import math

import pytest
import torch
from torch import Tensor

from pscommon.core.log_entries import PushKey, Staged
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from pscommon.parameters.means import total
from pscommon.system.thread_team import ALONE, ThreadTeam
from psserver.core.job.settings import ANY, GradientRules
from psserver.shard.engine import check_gradient
from tests.support.stores import Shards

TENSORS = {"w": (700, 1000), "odd": (3,), "h": (5, 33), "last": (1,)}
SAMPLES = (16, 5)
NORMS = GradientRules(norms=True)


def spec(dtype: str = "float32") -> ModelSpec:
    tensors = [TensorSpec(name, shape, dtype) for name, shape in TENSORS.items()]
    return ModelSpec(
        (*tensors, TensorSpec("mean", (7,), "float32", "buffer")),
        OptimizerSettings("sgd", ({"lr": 1.0},)),
    )


def push(seed: int, dtype: torch.dtype = torch.float32, without: str = "") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in TENSORS.items()
    }
    drawn.pop(without, None)
    return drawn | {"mean": torch.full((7,), 1e6)}


def square_norm(
    shards: Shards, *pushes: dict[str, Tensor], scales: tuple[float, ...] = ()
) -> float:
    staged = [shards.stage(each) for each in pushes]
    samples = SAMPLES[: len(pushes)]
    return sum(
        store.square_norm([each[shard] for each in staged], samples, scales)
        for shard, store in enumerate(shards.stores)
    )


def expected(*pushes: dict[str, Tensor], scales: tuple[float, ...] = (1.0, 1.0)) -> float:
    samples = SAMPLES[: len(pushes)]
    square = 0.0
    for name, shape in TENSORS.items():
        mean = torch.zeros(shape, dtype=torch.float64)
        for given, count, scale in zip(pushes, samples, scales, strict=False):
            mean += given.get(name, torch.zeros(shape)).double() * (count / sum(samples) * scale)
        square += float(mean.square().sum())
    return square


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_the_norm_is_that_of_the_weighted_mean_without_padding_and_buffers(shards: int) -> None:
    """Padding is NaN here, and buffers are means of values, not gradients."""
    job, pushes = Shards(spec(), shards), (push(1), push(2, without="h"))

    assert square_norm(job, *pushes) == pytest.approx(expected(*pushes), rel=1e-6)
    assert square_norm(job, *pushes, scales=(0.5, 1.0)) == pytest.approx(
        expected(*pushes, scales=(0.5, 1.0)), rel=1e-6
    )
    assert square_norm(job, pushes[0]) == pytest.approx(expected(pushes[0]), rel=1e-6)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_the_norm_is_computed_for_any_floating_dtype(dtype: str) -> None:
    job, pushes = (
        Shards(spec(dtype), 2),
        (push(1, getattr(torch, dtype)), push(2, getattr(torch, dtype))),
    )

    assert square_norm(job, *pushes) == pytest.approx(
        expected(*pushes), rel=1e-12 if dtype == "float64" else 1e-3
    )


def test_the_same_bits_for_any_number_of_threads() -> None:
    """For the server's thread pool and for torch, whose sums of many elements depend on its
    threads.
    """
    before, found = torch.get_num_threads(), set()
    for team in (ALONE, ThreadTeam(2), ThreadTeam(3)):
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.add(square_norm(Shards(spec(), 1, team), push(1), push(2)))
    torch.set_num_threads(before)

    assert len(found) == 1


def test_measuring_changes_no_push() -> None:
    measured, untouched = Shards(spec(), 1), Shards(spec(), 1)
    for job in (measured, untouched):
        job.begin(push(0))
    staged = [measured.stage(push(1)), measured.stage(push(2))]
    for scales in ((), (0.1, 0.3)):
        measured.stores[0].square_norm([each[0] for each in staged], SAMPLES, scales)
    measured.apply(staged, SAMPLES)
    untouched.step(push(1), push(2), samples=SAMPLES)

    weights, others = measured.weights(), untouched.weights()
    assert all(torch.equal(weights[name], others[name]) for name in TENSORS)


def test_the_norm_of_one_push_is_computed_where_updates_consist_of_one_push() -> None:
    """In a round of several, that of their mean is measured instead; --max-norm always
    needs each.
    """
    clipped = ModelSpec(spec().tensors, OptimizerSettings("sgd", ({"lr": 1.0},), clip_norm=1.0))
    job, found = Shards(clipped, 1), []
    job.begin(push(0))
    for update in ([push(1)], [push(1), push(2)], [push(1)]):
        (staging,) = job.stage(push(3))
        found.append(
            [
                check_gradient(Staged(PushKey(1, 1), 1, 0), staging, job.stores[0], each)
                for each in (ANY, NORMS)
            ]
        )
        job.step(*update)

    own = square_norm(job, push(3))
    assert [[each.square_norm for each in both] for both in found] == [
        [own, own],
        [own, own],
        [0.0, own],
    ]


def test_a_sum_that_is_too_large_for_float64_is_infinite() -> None:
    assert total([1e308, 1e308]) == math.inf
    assert total([math.inf, 1.0]) == math.inf
    huge = {name: torch.full(shape, 1e200, dtype=torch.float64) for name, shape in TENSORS.items()}
    assert square_norm(Shards(spec("float64"), 1), huge | {"mean": torch.zeros(7)}) == math.inf
