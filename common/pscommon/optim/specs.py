"""Optimizers as specifications: name and hyper-parameters, checked against the registry
(pscommon/optim).

An optimizer crosses the wire as an `OptimizerSpec`; code never does.
"""

import inspect
import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from numbers import Real
from typing import Any

import torch

from pscommon.core.errors import InvalidRequestError, UnsupportedOptimizerError
from pscommon.core.model_spec import OptimizerSettings, Scalar, TensorSpec
from pscommon.optim import (
    KINDS,
    REFUSED_CLASSES,
    OptimizerKind,
    find_overflow,
    is_harmless,
    kind_of_class,
)

SUPPORTED = KINDS

Groups = tuple[Mapping[str, Scalar], ...]

Scalars = Mapping[str, Mapping[int, float]]
"""Numbers that an optimizer keeps once for each tensor: by name, then by index of the tensor in
the model.
"""

# Constructor arguments that choose an implementation or name the class; they do not change what is
# computed.
_NOT_HYPER = frozenset(
    {"params", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}
)


ROUNDING, SMALLEST_RATE = 1e-6, 1e-12
"""How far below zero rounding may bring a learning rate: relative to the registered one, and in
any case.
"""


def validate(spec: OptimizerSettings) -> OptimizerSettings:
    """The same optimizer with every hyper-parameter of every group filled in, numbers as floats.

    Raises UnsupportedOptimizerError for an unknown name, InvalidRequestError for a
    hyper-parameter that is unknown, of the wrong type, not finite, or that torch itself refuses.
    """
    kind = _kind(spec.name)
    if not spec.groups:
        raise InvalidRequestError(f"{spec.name}: an optimizer has at least one parameter group")
    groups = []
    for index, given in enumerate(spec.groups):
        group = _complete(f"{spec.name}, group {index}", given, kind.defaults)
        if problem := kind.check(group):
            raise InvalidRequestError(f"{spec.name}, group {index}: {problem}")
        groups.append(group)
    return OptimizerSettings(spec.name, tuple(groups), spec.clip_norm)


def spec_of(optimizer: torch.optim.Optimizer) -> OptimizerSettings:
    """Name and hyper-parameters, as they stand now, of each parameter group of a torch
    optimizer.

    Implementation choices (foreach, fused, capturable, differentiable) and keys that LR
    schedulers or users add to groups are left out; a tensor is read as a number. Raises
    UnsupportedOptimizerError for any class but those in SUPPORTED: a subclass may compute
    anything.
    """
    name = _name_of(optimizer)
    kind = SUPPORTED[name]
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        _refuse_unknown(optimizer, group, kind)
        source = group | {key: optimizer.defaults[key] for key in kind.constructor_only}
        values = {
            key: _plain(source.get(key, default), default) for key, default in kind.defaults.items()
        }
        groups.append(_complete(f"{name}, group {index}", values, kind.defaults))
    return OptimizerSettings(name, tuple(groups))


def groups_to_json(groups: Iterable[Mapping[str, Scalar]]) -> str:
    """Parameter groups as JSON; floats survive the way there and back bit by bit."""
    return json.dumps([dict(group) for group in groups], sort_keys=True, allow_nan=False)


def groups_from_json(text: str, like: OptimizerSettings) -> Groups:
    """Parameter groups from JSON, checked against the job's validated optimizer; what is left
    out is as in `like`.

    Names, types, finiteness and the number of groups are checked. Ranges are not, as torch does
    not check them after construction either: a scheduler may round a learning rate to just below
    zero. Raises InvalidRequestError.
    """
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"parameter groups are not JSON: {error}") from None
    if not isinstance(raw, list) or not all(isinstance(group, dict) for group in raw):
        raise InvalidRequestError("parameter groups should be a JSON list of objects")
    if len(raw) != len(like.groups):
        raise InvalidRequestError(
            f"{like.name}: {len(raw)} parameter groups, the job has {len(like.groups)}"
        )
    return tuple(
        _complete(f"{like.name}, group {index}", group, present)
        for index, (group, present) in enumerate(zip(raw, like.groups, strict=True))
    )


def groups_of_push(text: str, like: OptimizerSettings, tensors: Iterable[TensorSpec]) -> Groups:
    """Return a push's parameter groups: as `groups_from_json`, with `check_rates` and
    `check_numbers`.
    """
    groups = groups_from_json(text, like)
    check_rates(groups, like)
    check_numbers(OptimizerSettings(like.name, groups), tensors)
    return groups


def check_numbers(optimizer: OptimizerSettings, tensors: Iterable[TensorSpec]) -> None:
    """Raise InvalidRequestError for hyper-parameters with which a formula may raise an
    exception.

    A server would stop at an update that all servers have agreed on. As in torch, a learning
    rate may be just below zero, to which schedulers round, and SGD's nesterov may stand beside a
    momentum of zero.
    """
    kind = _kind(optimizer.name)
    for index, group in enumerate(optimizer.groups):
        where = f"{optimizer.name}, group {index}"
        values: Mapping[str, Any] = {
            key: value for key, value in group.items() if key != "nesterov"
        }
        lr = {"lr": max(0.0, values["lr"])} if "lr" in values else {}
        if problem := kind.check({**values, **lr}):
            raise InvalidRequestError(f"{where}: {problem}")
        if is_harmless(kind, group):
            continue
        for dtype in {
            each.dtype for each in tensors if each.role == "trainable" and each.group == index
        }:
            if problem := find_overflow(kind, group, getattr(torch, dtype)):
                raise InvalidRequestError(
                    f"{where}: too large a number for {dtype} weights: {problem}"
                )


def check_rates(groups: Groups, like: OptimizerSettings) -> None:
    """Raise InvalidRequestError for a learning rate below -1e-6 times the registered one.

    A scheduler may round a rate to just below zero. A clearly negative one makes every update
    ascend the loss.
    """
    for index, (group, registered) in enumerate(zip(groups, like.groups, strict=True)):
        rate, own = group.get("lr", 0.0), registered.get("lr", 0.0)
        if (
            isinstance(rate, float)
            and isinstance(own, float)
            and rate < -max(ROUNDING * own, SMALLEST_RATE)
        ):
            raise InvalidRequestError(
                f"push refused: the learning rate of group {index} is {rate}, below 0 "
                f"(registered: {own}). Try: correct the scheduler of the script.",
                "OUT_OF_RANGE",
            )


def scalars_to_json(scalars: Scalars) -> str:
    """Return numbers per tensor as JSON, which keeps every bit; empty where there are none."""
    return (
        json.dumps({name: dict(values) for name, values in scalars.items()}, sort_keys=True)
        if scalars
        else ""
    )


def scalars_from_json(text: str) -> dict[str, dict[int, float]]:
    """Return what `scalars_to_json` wrote. AttributeError, TypeError or ValueError for another
    text.
    """
    raw = json.loads(text) if text else {}
    return {
        name: {int(index): float(value) for index, value in values.items()}
        for name, values in raw.items()
    }


def _kind(name: str) -> OptimizerKind:
    if name not in SUPPORTED:
        reason = next(
            (why for refused, why in REFUSED_CLASSES.items() if refused.lower() == name), ""
        )
        raise UnsupportedOptimizerError(
            f"servers cannot run {name!r}: {reason}"
            if reason
            else f"optimizer {name!r} is not one of {', '.join(sorted(SUPPORTED))}. Try: one of "
            f"these, or start every "
            "ps-server with `--optimizers MODULE`, the module that registers it."
        )
    return SUPPORTED[name]


def _name_of(optimizer: torch.optim.Optimizer) -> str:
    cls = type(optimizer)
    names = [name for name, _ in kind_of_class(cls)]
    if not names:
        reason = (
            REFUSED_CLASSES.get(cls.__name__) if cls.__module__.startswith("torch.optim") else None
        )
        known = ", ".join(sorted(kind.torch_class.__name__ for kind in SUPPORTED.values()))
        raise UnsupportedOptimizerError(
            f"servers cannot run {cls.__module__}.{cls.__qualname__}: "
            f"{reason or 'it is not registered'}. They run {known} (these classes themselves, no "
            "subclasses). Try: one of these, or register a formula of your own (--optimizers "
            "MODULE)."
        )
    if names[0] not in ("adam", "adamw"):
        return names[0]
    # newer torch makes AdamW of Adam by this key, which a group may set for itself
    decoupled = {
        bool(group.get("decoupled_weight_decay", cls is torch.optim.AdamW))
        for group in optimizer.param_groups
    }
    if len(decoupled) > 1:
        raise UnsupportedOptimizerError(
            "parameter groups differ in decoupled_weight_decay; use Adam or AdamW for all"
        )
    return "adamw" if decoupled == {True} else "adam"


def _refuse_unknown(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], kind: OptimizerKind
) -> None:
    """A hyper-parameter that a newer torch has added may stand at its default, where it changes
    nothing.
    """
    arguments = inspect.signature(type(optimizer)).parameters
    for key in (group.keys() & arguments.keys()) - kind.defaults.keys() - _NOT_HYPER:
        if group[key] is not arguments[key].default and group[key] != arguments[key].default:
            raise UnsupportedOptimizerError(
                f"the servers do not know {key}={group[key]!r} of "
                f"torch.optim.{type(optimizer).__name__}"
            )


def _plain(value: Any, default: Scalar) -> Any:
    """Tensors as numbers, and truth as torch takes it."""
    if isinstance(default, tuple):
        return tuple(_plain(item, 0.0) for item in value)
    if isinstance(value, torch.Tensor):
        value = value.item()
    return bool(value) if isinstance(default, bool) else value


def _complete(
    where: str, group: Mapping[str, Any], defaults: Mapping[str, Scalar]
) -> dict[str, Scalar]:
    unknown = sorted(group.keys() - defaults.keys())
    if unknown:
        raise InvalidRequestError(
            f"{where}: unknown hyper-parameter {unknown[0]!r}; known are {', '.join(defaults)}"
        )
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
