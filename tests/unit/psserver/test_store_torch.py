"""Servers step exactly as one torch process that averages the same gradients, for any number of
shards.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from pscommon.core.model_spec import ModelSpec, OptimizerSettings
from pscommon.optim import KINDS
from pscommon.optim.specs import Groups, validate
from pscommon.system.thread_team import ThreadTeam
from tests.support.optimizer_cases import CASES as OPTIMIZER_CASES
from tests.support.stores import Shards, model, noise, one_thread, plain_of  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 100
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
SHAPES = [(), (1,), (3, 5), (17,), (33, 31), (0, 4), (64,), (257,), (7, 11, 13), (40,)]

CASES = [
    (name, [cases.default], workers)
    for name, cases in OPTIMIZER_CASES.items()
    for workers in (1, 2, 3)
]
CASES += [(name, groups, 2) for name, cases in OPTIMIZER_CASES.items() for groups in cases.variants]


def mixed(
    name: str, groups: list[dict[str, Any]], dtypes: tuple[str, ...] = ("float32", "float64")
) -> ModelSpec:
    """Return unusual shapes of each dtype, dealt to the parameter groups in turn."""
    tensors = [
        (shape, dtype, place % len(groups))
        for dtype in dtypes
        for place, shape in enumerate(SHAPES)
    ]
    return model(*tensors, optimizer=OptimizerSettings(name, tuple(groups)))


def scheduled(groups: Groups, step: int) -> Groups:
    """Return the groups with another learning rate at each step, as a scheduler yields them."""
    return tuple({**group, "lr": group["lr"] * (0.5 + 0.05 * (step * 7 % 10))} for group in groups)


def gradients(
    weights: dict[str, Tensor], samples: list[dict[str, Tensor]]
) -> list[dict[str, Tensor]]:
    """Return each worker's gradients. They depend on the weights, so an error shows in the next
    step.
    """
    return [
        {name: weights[name].mul(0.1).add_(value) for name, value in sample.items()}
        for sample in samples
    ]


def difference(ours: dict[str, Tensor], plain: dict[str, Tensor], dtype: torch.dtype) -> float:
    """Return the largest difference, relative to the largest value of its tensor."""
    return max(
        float((ours[name] - value).abs().max() / value.abs().max())
        for name, value in plain.items()
        if value.dtype is dtype and value.numel()
    )


@pytest.mark.every(8)
@pytest.mark.parametrize(("name", "groups", "workers"), CASES)
def test_a_hundred_steps_equal_those_of_one_torch_process(
    name: str, groups: list[dict[str, Any]], workers: int
) -> None:
    spec = mixed(name, groups)
    start = noise(spec, seed=7)
    plain = plain_of(spec, start)
    jobs = [Shards(spec, shards) for shards in (1, 2, 3)]
    for job in jobs:
        job.begin(start)
    for step in range(STEPS):
        now = scheduled(validate(spec.optimizer).groups, step)
        samples = [noise(spec, 1000 * step + worker) for worker in range(workers)]
        plain.step(*gradients(plain.weights, samples), groups=now)
        for job in jobs:
            job.step(*gradients(job.weights(), samples), groups=now)
    results = [job.weights() for job in jobs]

    for dtype, tolerance in TOLERANCE.items():
        assert difference(results[0], plain.weights, dtype) <= tolerance
    for other in results[1:]:
        assert all(torch.equal(other[name].view(-1), results[0][name].view(-1)) for name in other)


CENTERED = ("rmsprop", {"lr": 1e-3, "centered": True, "momentum": 0.9, "eps": 1e-3})
HALF_VARIANTS = [
    (name, cases.default | cases.in_16_bits) for name, cases in OPTIMIZER_CASES.items()
]
HALF_VARIANTS += [("sgd", {"lr": 0.05, "momentum": 0.9, "nesterov": True}), CENTERED]
DEFAULTS = [(name, cases.default) for name, cases in OPTIMIZER_CASES.items()]


@pytest.mark.parametrize(("name", "group"), HALF_VARIANTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_weights_follow_a_double_precision_process(
    name: str, group: dict[str, Any], dtype: str
) -> None:
    group = group | {"eps": 1e-3} if "eps" in KINDS[name].defaults else group
    spec = mixed(name, [group], (dtype,))
    start = noise(spec, seed=7)
    plain = plain_of(spec, {name: value.double() for name, value in start.items()})
    jobs = [Shards(spec, shards) for shards in (1, 2, 3)]
    for job in jobs:
        job.begin(start)
    for step in range(10):
        samples = [noise(spec, 1000 * step + worker) for worker in range(3)]
        plain.step(
            *({name: value.double() for name, value in sample.items()} for sample in samples)
        )
        for job in jobs:
            job.step(*samples)
    results = [job.weights() for job in jobs]

    ours = {name: value.double() for name, value in results[0].items()}
    assert (
        difference(ours, plain.weights, torch.float64)
        <= 10 * torch.finfo(getattr(torch, dtype)).eps
    )
    assert (
        difference(ours, {name: value.double() for name, value in start.items()}, torch.float64)
        > 1e-2
    )
    for other in results[1:]:
        assert all(torch.equal(other[name].view(-1), results[0][name].view(-1)) for name in other)


@pytest.mark.every(4)
@pytest.mark.parametrize(("name", "group"), [*DEFAULTS, CENTERED])
def test_the_number_of_threads_changes_no_bit(
    name: str, group: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pscommon.system.thread_team.PART_BYTES", 4096)
    spec = model(
        ((90_001,), "float32"),
        ((70, 1001), "float64"),
        ((5,), "float32"),
        ((70_003,), "bfloat16"),
        optimizer=OptimizerSettings(name, (group,)),
    )
    results = []
    for threads, shards in ((1, 1), (3, 1), (4, 1), (2, 3)):
        job = Shards(spec, shards, ThreadTeam(threads))
        job.begin(noise(spec, seed=7))
        for step in range(3):
            job.step(*(noise(spec, 10 * step + worker) for worker in range(3)), samples=[1, 2, 4])
        results.append(job.weights())

    for other in results[1:]:
        assert all(torch.equal(other[name].view(-1), results[0][name].view(-1)) for name in other)
