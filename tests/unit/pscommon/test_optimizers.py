"""The table of optimizers equals torch's and accepts only names and numbers."""

import inspect
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pscommon.core.errors import InvalidRequestError, UnsupportedOptimizerError
from pscommon.core.model_spec import OptimizerSettings
from pscommon.optim import KINDS, REFUSED_CLASSES
from pscommon.optim.specs import check_rates, groups_from_json, spec_of, validate
from tests.support.optimizer_cases import SINGLE_GROUPS

IMPLEMENTATION = {"params", "foreach", "fused", "capturable", "differentiable"}


def weights(count: int = 1) -> list[torch.Tensor]:
    return [torch.nn.Parameter(torch.zeros(3)) for _ in range(count)]


# ---- the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_defaults_are_those_of_torch(name: str) -> None:
    kind = KINDS[name]
    arguments = inspect.signature(kind.torch_class).parameters
    theirs = {
        key: argument.default for key, argument in arguments.items() if key not in IMPLEMENTATION
    }
    if name in ("adam", "adamw"):  # there it selects the class
        theirs.pop("decoupled_weight_decay", None)

    assert validate(OptimizerSettings(name)).groups == (theirs,)


@pytest.mark.parametrize(("name", "group"), [*((name, {}) for name in KINDS), *SINGLE_GROUPS])
def test_states_are_those_of_torch(name: str, group: dict[str, Any]) -> None:
    kind = KINDS[name]
    (weight,) = weights()
    weight.grad = torch.ones(3)
    optimizer = kind.torch_class([weight], **group)
    optimizer.step()
    state = {
        key: value
        for key, value in optimizer.state[weight].items()
        if torch.is_tensor(value) and key != "step"
    }

    assert {each.name for each in kind.states_of({**kind.defaults, **group})} == {
        k for k, v in state.items() if v.dim()
    }
    assert {each.name for each in kind.scalars} == {k for k, v in state.items() if not v.dim()}


# ---- validate ------------------------------------------------------------------------------------


def test_numbers_become_floats_so_that_equal_ones_compare_equal() -> None:
    one = validate(
        OptimizerSettings("adam", ({"lr": 1, "betas": [0, 0.5]}, {"weight_decay": np.float32(0.5)}))
    )  # type: ignore[dict-item]
    two = validate(
        OptimizerSettings("adam", ({"lr": 1.0, "betas": (0.0, 0.5)}, {"weight_decay": 0.5}))
    )

    assert one == two
    assert json.dumps(one.as_dict()) == json.dumps(two.as_dict())
    assert validate(one) == one


@pytest.mark.parametrize("name", ["SGD", "", "os.system"])
def test_an_unknown_name_is_refused_with_the_known_ones_and_a_remedy(name: str) -> None:
    with pytest.raises(
        UnsupportedOptimizerError, match=r"is not one of .*adam, .*sgd.*--optimizers MODULE"
    ) as caught:
        validate(OptimizerSettings(name))

    assert caught.value.reason == "UNSUPPORTED_OPTIMIZER"


REFUSED = [
    ("LBFGS", "several times"),
    ("Muon", "weight matrices"),
    ("Adafactor", "row and column means"),
    ("SparseAdam", "sparse gradients"),
]


@pytest.mark.parametrize(("name", "why"), REFUSED)
def test_methods_that_need_whole_tensors_are_refused_with_the_reason(name: str, why: str) -> None:
    cls = getattr(torch.optim, name, None)
    with pytest.raises(UnsupportedOptimizerError, match=why):
        validate(OptimizerSettings(name.lower()))
    if cls is None:  # torch 2.6 has no Muon
        return
    with pytest.raises(UnsupportedOptimizerError, match=why) as caught:
        spec_of(cls([torch.nn.Parameter(torch.zeros(3, 3))]))

    assert name in str(caught.value)


def test_every_optimizer_of_torch_is_supported_or_refused_with_a_reason() -> None:
    classes = {
        name: cls
        for name, cls in vars(torch.optim).items()
        if inspect.isclass(cls)
        and issubclass(cls, torch.optim.Optimizer)
        and cls is not torch.optim.Optimizer
    }
    known = {kind.torch_class for kind in KINDS.values()}

    assert [
        name for name, cls in classes.items() if cls not in known and name not in REFUSED_CLASSES
    ] == []


@pytest.mark.parametrize(
    ("name", "group", "complaint"),
    [
        ("sgd", {"lr": -0.1}, "group 1: lr is -0.1, below 0"),
        ("sgd", {"lr": math.nan}, "lr is nan, not a finite number"),
        ("sgd", {"lr": math.inf}, "not a finite number"),
        ("sgd", {"lr": 10**400}, "not a finite number"),
        ("sgd", {"lr": "0.1"}, "lr is '0.1', not a finite number"),
        ("sgd", {"lr": None}, "not a finite number"),
        ("sgd", {"lr": True}, "not a finite number"),
        ("sgd", {"lr": 1j}, "not a finite number"),
        ("sgd", {"nesterov": True}, "nesterov needs a momentum"),
        ("sgd", {"nesterov": 1}, "nesterov is 1, not true or false"),
        ("sgd", {"betas": (0.9, 0.99)}, "unknown hyper-parameter 'betas'"),
        ("adam", {"betas": (0.9,)}, "not 2 numbers"),
        ("adam", {"betas": 0.9}, "not 2 numbers"),
        ("adam", {"betas": (0.9, 1.0)}, "not at least 0 and below 1"),
        ("adam", {"fused": True}, "unknown hyper-parameter 'fused'"),
        ("adamw", {"eps": -1.0}, "eps is -1.0, below 0"),
        ("adagrad", {"lr_decay": -1.0}, "lr_decay is -1.0, below 0"),
        ("rmsprop", {"alpha": -1.0}, "alpha is -1.0, below 0"),
    ],
)
def test_a_bad_hyper_parameter_is_reported_with_its_group(
    name: str, group: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InvalidRequestError, match=complaint) as caught:
        validate(OptimizerSettings(name, ({}, group)))

    assert str(caught.value).startswith(f"{name}, group 1")


# torch accepts these, and its formula then divides by zero, or takes a power that is too large
RAISES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "nadam": lambda group: np.float32(group["betas"][0]) == 1,
    "asgd": lambda group: group["lambd"] < 0 or not 0 <= group["alpha"] <= 1,
}


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
def test_exactly_the_hyper_parameters_that_torch_refuses_are_refused(
    name: str, data: st.DataObject
) -> None:
    kind, number = (
        KINDS[name],
        st.sampled_from([-1.0, -1e-9, 0.0, 1e-9, 0.5, 1.0 - 1e-9, 1.0, 2.0]),
    )
    drawn = {bool: st.booleans(), tuple: st.tuples(number, number), float: number}
    group = {key: data.draw(drawn[type(default)], key) for key, default in kind.defaults.items()}
    try:
        kind.torch_class(weights(), **group)
    except ValueError:
        with pytest.raises(InvalidRequestError, match="group 0: "):
            validate(OptimizerSettings(name, (group,)))
    else:
        if name in RAISES and RAISES[name](group):
            with pytest.raises(InvalidRequestError, match="group 0: "):
                validate(OptimizerSettings(name, (group,)))
        else:
            assert validate(OptimizerSettings(name, (group,))).groups == (group,)


@pytest.mark.parametrize(
    ("cls", "group"),
    [
        (torch.optim.NAdam, {"betas": (1 - 1e-9, 0.999), "momentum_decay": 1e9}),
        (torch.optim.ASGD, {"lr": 1.0, "lambd": -1.0}),
        (torch.optim.ASGD, {"lr": 1.0, "lambd": 1.0, "alpha": 2000.0}),
    ],
)
def test_hyper_parameters_for_which_the_formula_raises_are_refused(
    cls: Any, group: dict[str, Any]
) -> None:
    """A server must not fail at an update that all servers have agreed on."""
    (weight,) = weights()
    weight.grad = torch.ones(3)
    optimizer = cls([weight], **group)
    with pytest.raises(ArithmeticError):
        optimizer.step()

    with pytest.raises(InvalidRequestError):
        validate(spec_of(optimizer))


def test_an_optimizer_needs_a_group() -> None:
    with pytest.raises(InvalidRequestError, match="no parameter group"):
        validate(OptimizerSettings("sgd", ()))


# ---- spec_of -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "name", "group"),
    [
        (
            lambda w: torch.optim.SGD(w, 0.1, 0.9, nesterov=True, weight_decay=1e-4),
            "sgd",
            {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4},
        ),
        (
            lambda w: torch.optim.Adam(w, betas=(0.8, 0.9), amsgrad=True, foreach=True),
            "adam",
            {"betas": (0.8, 0.9), "amsgrad": True},
        ),
        (lambda w: torch.optim.AdamW(w, 3e-4, fused=True), "adamw", {"lr": 3e-4}),
        (
            lambda w: torch.optim.Adagrad(w, lr_decay=0.1, initial_accumulator_value=0.5),
            "adagrad",
            {"lr_decay": 0.1, "initial_accumulator_value": 0.5},
        ),
        (
            lambda w: torch.optim.RMSprop(w, centered=True, momentum=0.5, differentiable=False),
            "rmsprop",
            {"centered": True, "momentum": 0.5},
        ),
        (lambda w: torch.optim.SGD(w, torch.tensor(0.5), nesterov=False), "sgd", {"lr": 0.5}),
    ],
)
def test_a_torch_optimizer_is_converted(optimizer: Any, name: str, group: dict[str, Any]) -> None:
    assert spec_of(optimizer(weights())) == validate(OptimizerSettings(name, (group,)))


def test_each_parameter_group_is_converted() -> None:
    one, two, three = weights(3)
    optimizer = torch.optim.AdamW(
        [{"params": [one], "lr": 0.5}, {"params": [two], "weight_decay": 0.0, "name": "bias"}]
    )
    optimizer.add_param_group({"params": [three], "betas": [0.5, 0.6]})

    assert spec_of(optimizer) == validate(
        OptimizerSettings("adamw", ({"lr": 0.5}, {"weight_decay": 0.0}, {"betas": (0.5, 0.6)}))
    )


def test_values_of_schedulers_are_converted_without_their_extra_keys() -> None:
    optimizer = torch.optim.SGD(weights(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    before = spec_of(optimizer).groups[0]
    optimizer.step()
    scheduler.step()
    after = spec_of(optimizer).groups[0]

    assert before.keys() == after.keys() == KINDS["sgd"].defaults.keys()
    assert before["lr"] != after["lr"]
    assert before["momentum"] != after["momentum"]


def test_a_learning_rate_rounded_below_zero_is_accepted() -> None:
    optimizer = torch.optim.SGD(weights(), lr=0.1)
    optimizer.param_groups[0]["lr"] = -1e-20

    assert spec_of(optimizer).groups[0]["lr"] == -1e-20


@pytest.mark.parametrize(
    ("registered", "rate"), [(0.1, -1e-20), (0.1, -0.9e-7), (0.0, -1e-13), (1.0, 0.0), (1.0, 9.0)]
)
def test_a_push_may_have_a_learning_rate_that_is_negative_by_rounding(
    registered: float, rate: float
) -> None:
    like = validate(OptimizerSettings("adam", ({"lr": registered},)))

    check_rates(groups_from_json(json.dumps([{"lr": rate}]), like), like)


@pytest.mark.parametrize(
    ("registered", "rate"), [(0.1, -0.1), (0.1, -1.1e-7), (0.0, -1e-9), (1e-3, -1e-3)]
)
def test_a_push_with_a_negative_learning_rate_is_refused(registered: float, rate: float) -> None:
    """Only on arrival: entries that an earlier release recorded are replayed unchanged."""
    like, text = (
        validate(OptimizerSettings("sgd", ({"lr": registered},))),
        json.dumps([{"lr": rate}]),
    )

    with pytest.raises(InvalidRequestError) as caught:
        check_rates(groups_from_json(text, like), like)
    assert caught.value.reason == "OUT_OF_RANGE"
    assert groups_from_json(text, like)[0]["lr"] == rate


def test_adagrad_starts_from_its_constructor_value_as_in_torch() -> None:
    optimizer = torch.optim.Adagrad(
        [{"params": weights(), "initial_accumulator_value": 7.0}], initial_accumulator_value=0.5
    )

    assert spec_of(optimizer).groups[0]["initial_accumulator_value"] == 0.5


@pytest.mark.skipif(
    "decoupled_weight_decay" not in inspect.signature(torch.optim.Adam).parameters,
    reason="this torch has no such Adam",
)
def test_adam_with_decoupled_weight_decay_is_adamw() -> None:
    decoupled = torch.optim.Adam(weights(), decoupled_weight_decay=True)
    coupled = torch.optim.AdamW([{"params": weights(), "decoupled_weight_decay": False}])
    both = torch.optim.AdamW(
        [{"params": weights(), "decoupled_weight_decay": False}, {"params": weights()}]
    )

    assert spec_of(decoupled) == validate(OptimizerSettings("adamw", ({"weight_decay": 0.0},)))
    assert spec_of(coupled) == validate(OptimizerSettings("adam", ({"weight_decay": 0.01},)))
    with pytest.raises(UnsupportedOptimizerError, match="differ in decoupled_weight_decay"):
        spec_of(both)


class MySGD(torch.optim.SGD):
    """Optimizer that could compute anything in step()."""


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        (MySGD, "MySGD"),
        (torch.optim.LBFGS, "torch.optim.lbfgs.LBFGS"),
    ],
)
def test_unregistered_classes_and_subclasses_are_refused(
    optimizer: type[torch.optim.Optimizer], name: str
) -> None:
    with pytest.raises(
        UnsupportedOptimizerError, match=r"ASGD, .*, AdamW, .*no subclasses"
    ) as caught:
        spec_of(optimizer(weights()))

    assert name in str(caught.value)


def test_a_newer_torch_hyper_parameter_is_accepted_only_at_its_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def newer(
        self: Any, params: Any, lr: float = 0.1, cautious: bool = False, **rest: Any
    ) -> None: ...

    unchanged, changed = torch.optim.SGD(weights()), torch.optim.SGD(weights())
    unchanged.param_groups[0]["cautious"], changed.param_groups[0]["cautious"] = False, True
    monkeypatch.setattr(torch.optim.SGD, "__init__", newer)

    assert spec_of(unchanged).name == "sgd"
    with pytest.raises(UnsupportedOptimizerError, match=r"SGD with cautious=True"):
        spec_of(changed)
