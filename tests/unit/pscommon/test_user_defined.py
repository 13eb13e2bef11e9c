"""User-defined optimizers: what `register` accepts and refuses, and what servers compute."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pscommon.core.errors import InvalidRequestError, MismatchError
from pscommon.core.model_spec import OptimizerSettings
from pscommon.optim import (
    KINDS,
    ElementwiseOptimizer,
    check_same_optimizers,
    digest_of_user_defined,
    load_module,
    register,
)
from pscommon.optim import registry as table
from pscommon.optim.specs import spec_of, validate
from tests.support.stores import Plain, begun, model, noise, one_thread  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread", "_only_here")


@pytest.fixture
def _only_here() -> Iterator[None]:
    """Remove what a test has registered."""
    before = dict(table._KINDS)
    yield
    table._KINDS.clear()
    table._KINDS.update(before)


class Decaying(ElementwiseOptimizer):
    """Momentum that fades with each step, with one scalar per tensor."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.5),
        sign: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "sign": sign})


def decaying(weight: Tensor, gradient: Tensor, state: Any, group: Any) -> None:
    state["fade"] *= group["betas"][1]
    momentum = state["momentum"]
    momentum.mul_(group["betas"][0]).add_(gradient, alpha=1 / state["step"])
    update = momentum.sign() if group["sign"] else momentum
    weight.add_(update, alpha=-group["lr"] * (1 - float(state["fade"])))


def decayed(cls: type[torch.optim.Optimizer] = Decaying, **other: Any) -> None:
    register(cls, decaying, **{"states": ["momentum"], "scalars": {"fade": 1.0}} | other)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_servers_compute_what_the_class_computes_locally(shards: int) -> None:
    """100 steps: tensors split over shards, groups, a schedule, and tensors without gradients."""
    decayed()
    spec = model(
        ((700,), "float32", 0),
        ((13, 3), "float64", 1),
        ((5,), "float32", 1),
        ((900,), "float64", 0),
        optimizer=OptimizerSettings("decaying", ({"lr": 0.01}, {"lr": 0.02, "sign": True})),
    )
    job = begun(spec, shards)
    plain = Plain(Decaying, spec, job.weights())
    first = validate(spec.optimizer).groups
    for step in range(100):
        push = noise(spec, step)
        if step % 3:
            del push["t1"]
        groups = tuple({**group, "betas": (0.9, 0.5 + 0.004 * step)} for group in first)
        plain.step(push, groups=groups)
        job.step(push, groups=groups)

    for name, weight in job.weights().items():
        torch.testing.assert_close(weight, plain.weights[name], rtol=1e-5, atol=1e-6)
    assert {name for store in job.stores for name in store.scalars()} == {"fade"}


def test_hyper_parameters_come_from_the_constructor() -> None:
    decayed()
    optimizer = Decaying([torch.nn.Parameter(torch.zeros(1))], lr=1)

    assert spec_of(optimizer) == validate(OptimizerSettings("decaying", ({"lr": 1.0},)))
    assert KINDS["decaying"].defaults == {"lr": 0.1, "betas": (0.9, 0.5), "sign": False}
    with pytest.raises(InvalidRequestError, match="betas are"):
        validate(OptimizerSettings("decaying", ({"betas": (1.0, 0.5)},)))


def test_a_check_of_the_class_replaces_the_ranges() -> None:
    decayed(check=lambda group: "lr is one" if group["lr"] == 1 else "")

    assert validate(OptimizerSettings("decaying", ({"lr": -2.0},))).groups[0]["lr"] == -2.0
    with pytest.raises(InvalidRequestError, match="decaying, group 0: lr is one"):
        validate(OptimizerSettings("decaying", ({"lr": 1.0},)))


def centered(weight: Tensor, gradient: Tensor, state: Any, group: Any) -> None:
    weight.sub_(gradient - gradient.mean())


def scaled_by_norm(weight: Tensor, gradient: Tensor, state: Any, group: Any) -> None:
    state["momentum"].add_(gradient / (gradient.norm() + 1))
    weight.sub_(state["momentum"])


def scalar_of_gradients(weight: Tensor, gradient: Tensor, state: Any, group: Any) -> None:
    state["fade"].add_(gradient[0])


def changes_the_gradient(weight: Tensor, gradient: Tensor, state: Any, group: Any) -> None:
    weight.sub_(gradient.mul_(2))


def fails(weight: Tensor, gradient: Tensor, state: Any, group: Any) -> None:
    raise ZeroDivisionError("no")


@pytest.mark.parametrize(
    ("formula", "why"),
    [
        (centered, "not elementwise"),
        (scaled_by_norm, "not elementwise"),
        (scalar_of_gradients, "not elementwise"),
        (changes_the_gradient, "changes the gradient"),
        (fails, "ZeroDivisionError"),
    ],
)
def test_a_formula_that_needs_whole_tensors_is_refused(
    formula: Callable[..., None], why: str
) -> None:
    with pytest.raises(InvalidRequestError, match=f"Decaying: .*{why}"):
        register(Decaying, formula, states=["momentum"], scalars={"fade": 1.0})

    assert "decaying" not in KINDS


def test_a_taken_name_is_refused_and_the_same_class_replaces_itself() -> None:
    class Adam(ElementwiseOptimizer):
        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, {"lr": lr})

    with pytest.raises(
        InvalidRequestError, match=r"the name adam belongs to torch\.optim\.adam\.Adam"
    ):
        register(Adam, centered)
    decayed()
    decayed(check=lambda group: "again")

    assert KINDS["decaying"].check({}) == "again"


@pytest.mark.parametrize("names", [["weight"], ["step"], ["a b"], ["x@y"], ["fade"], ["m", "m"]])
def test_ambiguous_names_of_states_are_refused(names: list[str]) -> None:
    with pytest.raises(InvalidRequestError, match="have invalid names"):
        decayed(states=names)


def test_a_hyper_parameter_without_a_plain_default_is_refused() -> None:
    class Needy(ElementwiseOptimizer):
        def __init__(self, params: Any, lr: float, schedule: Any = None) -> None:
            super().__init__(params, {"lr": lr})

    with pytest.raises(InvalidRequestError, match="Needy: lr of its constructor"):
        register(Needy, decaying)


def test_the_digest_differs_between_sets_of_optimizers() -> None:
    nothing = digest_of_user_defined()
    decayed()
    one = digest_of_user_defined()
    decayed(states=["momentum", "unused"])
    two = digest_of_user_defined()
    check_same_optimizers("shard 1", two, "shard 0")

    assert (nothing, one.partition(" ")[0]) == ("", "decaying")
    assert len({nothing, one, two}) == 3
    with pytest.raises(MismatchError, match=r"shard 1 and shard 0 .* none and decaying") as caught:
        check_same_optimizers("shard 1", "", "shard 0")
    assert caught.value.reason == "SHARD_MISMATCH"


# ---- modules -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "code", "why"),
    [
        ("ps_not_there", None, "there is no module ps_not_there. Try: start this command in"),
        ("ps_pack.inner", None, "there is no module ps_pack"),
        (
            "ps_needs_more",
            "import ps_not_there_either",
            r"importing it raised ModuleNotFoundError\(.*ps_not_there_either",
        ),
        ("ps_broken", "1 / 0", "importing it raised ZeroDivisionError"),
        ("ps_syntax", "def", "importing it raised SyntaxError"),
        ("ps_empty", "", "registers no optimizer"),
    ],
)
def test_an_unusable_module_is_named_with_the_remedy(
    module: str, code: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    if code is not None:
        (tmp_path / f"{module}.py").write_text(code)

    with pytest.raises(InvalidRequestError, match=f"`--optimizers {module}` failed: .*{why}"):
        load_module(module)
