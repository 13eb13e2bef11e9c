"""Which tensors step, with which hyper-parameters, and which state they have: as in a torch
process.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from pscommon.core.errors import InvalidRequestError, UnsupportedOptimizerError
from pscommon.core.model_spec import ModelSpec, OptimizerSettings
from pscommon.core.partition import PartitionPlan
from psserver.parameters.store import ParameterStore
from tests.support.optimizer_cases import SINGLE_GROUPS
from tests.support.stores import SGD, begun, model, noise, one_thread, plain_of  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")

# ---- absent tensors ------------------------------------------------------------------------------


def six(name: str, group: dict[str, Any]) -> ModelSpec:
    shapes = [(3,), (40, 3), (), (130,), (7, 7), (64,)]
    return model(
        *((shape, "float64", place % 2) for place, shape in enumerate(shapes)),
        optimizer=OptimizerSettings(name, (group, group | {"lr": group["lr"] / 2})),
    )


def partial_values(values: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return part of the values, another part for each seed."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.rand(len(values), generator=generator) < 0.6
    return {
        name: value
        for (name, value), keep in zip(values.items(), states.tolist(), strict=True)
        if keep
    }


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "group"), SINGLE_GROUPS)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_tensor_without_a_gradient_is_unchanged_as_in_torch(
    name: str, group: dict[str, Any], shards: int
) -> None:
    spec = six(name, group)
    job = begun(spec, shards)
    plain = plain_of(spec, job.weights())
    stepped = dict.fromkeys(plain.weights, 0)
    for step in range(30):
        pushes = [
            partial_values(noise(spec, 100 * step + worker), 100 * step + worker)
            for worker in range(step % 3 + 1)
        ]
        plain.step(*pushes)
        job.step(*pushes)
        for tensor in set().union(*pushes):
            stepped[tensor] += 1

    for tensor, weight in job.weights().items():
        torch.testing.assert_close(weight, plain.weights[tensor], rtol=1e-12, atol=1e-12)
    assert len(set(stepped.values())) > 1
    if job.stores[0].state_nbytes:
        assert job.steps() == stepped


def test_parts_of_a_model_may_be_trained_alternately() -> None:
    spec = six("adam", {"lr": 1e-2, "amsgrad": True})
    job = begun(spec, shards=2)
    plain = plain_of(spec, job.weights())
    for step in range(20):
        push = {
            name: value
            for name, value in noise(spec, step).items()
            if int(name[1:]) // 3 == step % 2
        }
        plain.step(push)
        job.step(push)

    for tensor, weight in job.weights().items():
        torch.testing.assert_close(weight, plain.weights[tensor], rtol=1e-12, atol=1e-12)


def test_a_gradient_missing_in_one_push_counts_as_zero() -> None:
    spec = model(((100,), "float64"), ((9,), "float64"), optimizer=SGD)
    job = begun(spec)
    before, (first, second) = job.weights(), (noise(spec, 2), noise(spec, 3))
    job.step({"t1": first["t1"]}, {"t0": second["t0"]}, samples=[1, 3])

    torch.testing.assert_close(
        job.weights()["t0"], before["t0"] - 0.75 * second["t0"], rtol=1e-14, atol=0
    )
    torch.testing.assert_close(
        job.weights()["t1"], before["t1"] - 0.25 * first["t1"], rtol=1e-14, atol=0
    )


@pytest.mark.parametrize("index", [-1, 1, 2, 99])
def test_only_trainable_tensors_can_be_absent(index: int) -> None:
    spec = model(
        ((4,), "float32"), ((4,), "float32", "buffer"), ((4,), "float32", "frozen"), optimizer=SGD
    )

    with pytest.raises(InvalidRequestError, match=f"{index} is not a trainable tensor"):
        ParameterStore(PartitionPlan(spec, 1), 0).allocate_staging(absent=[index])


# ---- hyper-parameters ----------------------------------------------------------------------------


def test_the_first_push_with_hyper_parameters_decides() -> None:
    spec = model(((4,), "float64"), optimizer=SGD)
    job = begun(spec)
    before, push = job.weights()["t0"], noise(spec, 2)
    changed, other = ({**job.stores[0].groups()[0], "lr": lr} for lr in (0.5, 0.25))
    job.apply([job.stage(push), job.stage(push, (changed,)), job.stage(push, (other,))], [1, 2, 1])
    job.step(push)

    torch.testing.assert_close(job.weights()["t0"], before - 0.5 * push["t0"] - 0.5 * push["t0"])
    assert job.stores[0].groups() == (changed,)


@pytest.mark.parametrize("shards", [1, 2])
def test_momentum_may_be_switched_on_and_off(shards: int) -> None:
    spec = six("sgd", {"lr": 0.1})
    job = begun(spec, shards)
    plain = plain_of(spec, job.weights())
    for step in range(12):
        momentum = 0.0 if step % 6 < 3 else 0.9
        groups = tuple(
            {**group, "momentum": momentum, "dampening": 0.2} for group in job.stores[0].groups()
        )
        push = noise(spec, step)
        plain.step(push, groups=groups)
        job.step(push, groups=groups)

    for tensor, weight in job.weights().items():
        torch.testing.assert_close(weight, plain.weights[tensor], rtol=1e-12, atol=1e-12)


def test_optimizer_state_is_allocated_when_it_is_needed() -> None:
    spec = model(((64,), "float32"), optimizer=OptimizerSettings("adam", ({},)))
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
    spec = model(((4,), "float32"), optimizer=OptimizerSettings("lamb", ({},)))

    with pytest.raises(
        UnsupportedOptimizerError, match=r"'lamb'.*adam, .*sgd.*--optimizers MODULE"
    ):
        ParameterStore(PartitionPlan(spec, 1), 0)
