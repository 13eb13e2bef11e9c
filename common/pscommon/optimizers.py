"""The optimizers that servers can run: torch.optim's, known here by name and hyper-parameter.

An optimizer crosses the wire as an `OptimizerSpec`, which this table checks; code never does.
"""

import inspect
import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Real
from types import MappingProxyType
from typing import Any

import torch

from pscommon.core.errors import InvalidRequestError, UnsupportedOptimizerError
from pscommon.core.model import OptimizerSpec, Scalar

Groups = tuple[Mapping[str, Scalar], ...]


@dataclass(frozen=True, slots=True)
class State:
    """A tensor that the optimizer keeps beside each weight, by torch's name of it.

    switch: the hyper-parameter that asks for it; empty: it is always kept.
    initial: the hyper-parameter that it starts from; empty: it starts from zero.
    """

    name: str
    switch: str = ""
    initial: str = ""


@dataclass(frozen=True, slots=True)
class Kind:
    """One optimizer of torch.

    torch_class: the class in torch.optim; these have no constructor in common.
    defaults: every hyper-parameter with torch's default, whose type is the type that is asked for.
    fused: the dtypes that torch has a fused CPU kernel for, which passes over the memory once, not once per operation.
    by_step: the step's number enters the formula, so tensors that have stepped unequally often cannot share a call.
    first: hyper-parameters that take another value on a tensor's first step.
    constructor_only: hyper-parameters that torch reads from the constructor, whatever a parameter group says.
    """

    torch_class: type[Any]
    defaults: Mapping[str, Scalar]
    states: tuple[State, ...]
    fused: frozenset[torch.dtype]
    by_step: bool
    first: Mapping[str, Scalar] = field(default_factory=dict)
    constructor_only: frozenset[str] = frozenset()

    def states_of(self, group: Mapping[str, Scalar]) -> tuple[State, ...]:
        """What is kept for the weights of a parameter group with these hyper-parameters."""
        return tuple(state for state in self.states if not state.switch or group[state.switch])


_SGD: dict[str, Scalar] = {
    "lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False,
}  # fmt: skip
_ADAM: dict[str, Scalar] = {
    "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "maximize": False,
}  # fmt: skip
_ADAGRAD: dict[str, Scalar] = {
    "lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10, "maximize": False,
}  # fmt: skip
_RMSPROP: dict[str, Scalar] = {
    "lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False, "maximize": False,
}  # fmt: skip

_FULL = frozenset({torch.float64, torch.float32})
_ALL = _FULL | {torch.float16, torch.bfloat16}
_ADAM_STATES = (State("exp_avg"), State("exp_avg_sq"), State("max_exp_avg_sq", switch="amsgrad"))

SUPPORTED: Mapping[str, Kind] = MappingProxyType(
    {
        "sgd": Kind(
            torch.optim.SGD,
            _SGD,
            (State("momentum_buffer", switch="momentum"),),
            fused=_FULL,  # torch 2.13 leaves 16-bit weights as they are: https://github.com/pytorch/pytorch/issues/191763
            by_step=False,
            # torch starts the buffer as a copy of the first gradient: an undamped step from zero
            first={"dampening": 0.0},
        ),
        "adam": Kind(torch.optim.Adam, _ADAM, _ADAM_STATES, fused=_ALL, by_step=True),
        "adamw": Kind(torch.optim.AdamW, _ADAM | {"weight_decay": 1e-2}, _ADAM_STATES, fused=_ALL, by_step=True),
        "adagrad": Kind(
            torch.optim.Adagrad,
            _ADAGRAD,
            (State("sum", initial="initial_accumulator_value"),),
            fused=_ALL,
            by_step=True,
            constructor_only=frozenset({"initial_accumulator_value"}),
        ),
        "rmsprop": Kind(
            torch.optim.RMSprop,
            _RMSPROP,
            (State("square_avg"), State("momentum_buffer", switch="momentum"), State("grad_avg", switch="centered")),
            fused=frozenset(),
            by_step=False,
        ),
    }
)

# Constructor arguments that choose an implementation or name the class; they do not change what is computed.
_NOT_HYPER = frozenset({"params", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"})


def validate(spec: OptimizerSpec) -> OptimizerSpec:
    """The same optimizer with every hyper-parameter of every group filled in, numbers as floats.

    Raises UnsupportedOptimizerError for an unknown name, InvalidRequestError for a hyper-parameter that is unknown, of
    the wrong type, not finite, or that torch itself refuses.
    """
    kind = _kind(spec.name)
    if not spec.groups:
        raise InvalidRequestError(f"{spec.name}: an optimizer has at least one parameter group")
    groups = []
    for index, given in enumerate(spec.groups):
        group = _complete(f"{spec.name}, group {index}", given, kind.defaults)
        if problem := _out_of_range(group):
            raise InvalidRequestError(f"{spec.name}, group {index}: {problem}")
        groups.append(group)
    return OptimizerSpec(spec.name, tuple(groups))


def spec_of(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """Name and hyper-parameters, as they stand now, of each parameter group of a torch optimizer.

    Implementation choices (foreach, fused, capturable, differentiable) and keys that LR schedulers or users add to
    groups are left out; a tensor is read as a number. Raises UnsupportedOptimizerError for any class but those in
    SUPPORTED: a subclass may compute anything.
    """
    name = _name_of(optimizer)
    kind = SUPPORTED[name]
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        _refuse_unknown(optimizer, group, kind)
        source = group | {key: optimizer.defaults[key] for key in kind.constructor_only}
        values = {key: _plain(source.get(key, default), default) for key, default in kind.defaults.items()}
        groups.append(_complete(f"{name}, group {index}", values, kind.defaults))
    return OptimizerSpec(name, tuple(groups))


def groups_to_json(groups: Iterable[Mapping[str, Scalar]]) -> str:
    """Parameter groups as JSON; floats survive the way there and back bit by bit."""
    return json.dumps([dict(group) for group in groups], sort_keys=True, allow_nan=False)


def groups_from_json(text: str, like: OptimizerSpec) -> Groups:
    """Parameter groups from JSON, checked against the job's validated optimizer; what is left out is as in `like`.

    Names, types, finiteness and the number of groups are checked. Ranges are not, as torch does not check them after
    construction either: a scheduler may round a learning rate to just below zero. Raises InvalidRequestError.
    """
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"parameter groups are not JSON: {error}") from None
    if not isinstance(raw, list) or not all(isinstance(group, dict) for group in raw):
        raise InvalidRequestError("parameter groups should be a JSON list of objects")
    if len(raw) != len(like.groups):
        raise InvalidRequestError(f"{like.name}: {len(raw)} parameter groups, the job has {len(like.groups)}")
    return tuple(
        _complete(f"{like.name}, group {index}", group, present)
        for index, (group, present) in enumerate(zip(raw, like.groups, strict=True))
    )


def _kind(name: str) -> Kind:
    if name not in SUPPORTED:
        raise UnsupportedOptimizerError(f"optimizer {name!r} is not one of {', '.join(SUPPORTED)}")
    return SUPPORTED[name]


def _name_of(optimizer: torch.optim.Optimizer) -> str:
    cls = type(optimizer)
    names = [name for name, kind in SUPPORTED.items() if kind.torch_class is cls]
    if not names:
        supported = ", ".join(kind.torch_class.__name__ for kind in SUPPORTED.values())
        raise UnsupportedOptimizerError(
            f"the servers cannot run {cls.__module__}.{cls.__qualname__}; they run torch.optim's {supported} "
            "(these classes themselves, no subclasses)"
        )
    if names[0] not in ("adam", "adamw"):
        return names[0]
    # newer torch makes AdamW of Adam by this key, which a group may set for itself
    decoupled = {
        bool(group.get("decoupled_weight_decay", cls is torch.optim.AdamW)) for group in optimizer.param_groups
    }
    if len(decoupled) > 1:
        raise UnsupportedOptimizerError("parameter groups differ in decoupled_weight_decay; use Adam or AdamW for all")
    return "adamw" if decoupled == {True} else "adam"


def _refuse_unknown(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], kind: Kind) -> None:
    """A hyper-parameter that a newer torch has added may stand at its default, where it changes nothing."""
    arguments = inspect.signature(type(optimizer)).parameters
    for key in (group.keys() & arguments.keys()) - kind.defaults.keys() - _NOT_HYPER:
        if group[key] is not arguments[key].default and group[key] != arguments[key].default:
            raise UnsupportedOptimizerError(
                f"the servers do not know {key}={group[key]!r} of torch.optim.{type(optimizer).__name__}"
            )


def _out_of_range(group: Mapping[str, Any]) -> str:
    """What torch's constructor refuses, in words; empty: nothing. (An object of torch's would import its compiler.)"""
    for key, value in group.items():
        if key == "betas" and not all(0 <= beta < 1 for beta in value):
            return f"betas are {value}, not at least 0 and below 1"
        if key not in ("betas", "dampening") and value < 0:
            return f"{key} is {value}, below 0"
    if group.get("nesterov") and (group["momentum"] == 0 or group["dampening"] != 0):
        return "nesterov needs a momentum, and no dampening"
    return ""


def _plain(value: Any, default: Scalar) -> Any:
    """Tensors as numbers, and truth as torch takes it."""
    if isinstance(default, tuple):
        return tuple(_plain(item, 0.0) for item in value)
    if isinstance(value, torch.Tensor):
        value = value.item()
    return bool(value) if isinstance(default, bool) else value


def _complete(where: str, group: Mapping[str, Any], defaults: Mapping[str, Scalar]) -> dict[str, Scalar]:
    unknown = sorted(group.keys() - defaults.keys())
    if unknown:
        raise InvalidRequestError(f"{where}: unknown hyper-parameter {unknown[0]!r}; known are {', '.join(defaults)}")
    return {
        key: _checked(f"{where}: {key}", group[key], default) if key in group else default
        for key, default in defaults.items()
    }


def _checked(what: str, value: Any, default: Scalar) -> Scalar:
    if isinstance(default, bool):
        if isinstance(value, bool):
            return value
        raise InvalidRequestError(f"{what} is {value!r}, not true or false")
    if isinstance(default, tuple):
        if isinstance(value, tuple | list) and len(value) == len(default):
            return tuple(_number(what, item) for item in value)
        raise InvalidRequestError(f"{what} is {value!r}, not {len(default)} numbers")
    return _number(what, value)


def _number(what: str, value: Any) -> float:
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):  # an integer beyond all floats
            if math.isfinite(number := float(value)):
                return number
    raise InvalidRequestError(f"{what} is {value!r}, not a finite number")
