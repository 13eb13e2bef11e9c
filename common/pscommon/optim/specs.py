"""Optimizers as data: name and hyper-parameters, checked against the registry.

Only `OptimizerSettings` cross the wire, never code.
"""

import inspect
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from typing import Any

import torch

from pscommon.core.errors import InvalidRequestError, UnsupportedOptimizerError
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, Scalar, TensorSpec
from pscommon.optim import (
    KINDS,
    REFUSED_CLASSES,
    OptimizerKind,
    find_overflow,
    is_harmless,
    kind_of_class,
)

Groups = tuple[Mapping[str, Scalar], ...]

Scalars = Mapping[str, Mapping[int, float]]
"""State per tensor, by name and by index of the tensor in the model spec."""

# constructor arguments that choose an implementation or the class, and do not change the result
_NOT_HYPER = frozenset(
    {"params", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}
)


RATE_ROUNDING, MIN_RATE_ROUNDING = 1e-6, 1e-12
"""Accepted size of a negative learning rate: relative to the registered one, and at least."""


def validate(spec: OptimizerSettings) -> OptimizerSettings:
    """Return the optimizer with all hyper-parameters of all groups, numbers as floats.

    Raises:
        UnsupportedOptimizerError: The name is unknown.
        InvalidRequestError: A hyper-parameter is unknown, of the wrong type, not finite, or out of
            torch's range.
    """
    kind = _kind(spec.name)
    if not spec.groups:
        raise InvalidRequestError(
            f"optimizer {spec.name} is not valid: it has no parameter group. Try: at least one"
        )
    groups = []
    for index, given in enumerate(spec.groups):
        group = _complete(f"{spec.name}, group {index}", given, kind.defaults)
        if problem := kind.check(group):
            raise InvalidRequestError(f"{spec.name}, group {index}: {problem}")
        groups.append(group)
    return OptimizerSettings(spec.name, tuple(groups), spec.clip_norm)


def spec_of(optimizer: torch.optim.Optimizer) -> OptimizerSettings:
    """Return name and current hyper-parameters of all parameter groups of a torch optimizer.

    Implementation choices (foreach, fused, capturable, differentiable) and keys that LR
    schedulers or users add to groups are left out. A tensor is read as a number.

    Raises:
        UnsupportedOptimizerError: Its class is not in KINDS. Subclasses are not either: they
            may compute anything.
    """
    name = _name_of(optimizer)
    kind = KINDS[name]
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
    """Return parameter groups as JSON, which keeps every bit of floats."""
    return json.dumps([dict(group) for group in groups], sort_keys=True, allow_nan=False)


def validate_model(model: ModelSpec) -> ModelSpec:
    """Return the model with `validate` applied to its optimizers."""
    if isinstance(model.optimizer, OptimizerSettings):
        return ModelSpec(model.tensors, validate(model.optimizer))
    named = {name: validate(settings) for name, settings in model.optimizer.items()}
    return ModelSpec(model.tensors, named)


def groups_from_json(text: str, like: OptimizerSettings) -> Groups:
    """Return parameter groups from JSON.

    Names, types, finiteness and the number of groups are checked. Ranges are not: torch does not
    check them after construction either, and a scheduler may round a learning rate to just below
    zero.

    Args:
        text: Result of `groups_to_json`; hyper-parameters may be missing.
        like: The job's validated optimizer; it has the missing hyper-parameters.

    Raises:
        InvalidRequestError: The text does not fit.
    """
    return _completed(_parsed(text), like)


def all_groups_from_json(text: str, model: ModelSpec) -> dict[str, Groups]:
    """Return the parameter groups of each optimizer of a validated model; the JSON is one list.

    Raises:
        InvalidRequestError: As `groups_from_json`.
    """
    raw = _parsed(text)
    if len(raw) != len(model.groups):
        raise InvalidRequestError(
            f"there are {len(raw)} parameter groups, but {len(model.groups)} in the job"
        )
    return {
        name: _completed(raw[groups.start : groups.stop], model.optimizers[name])
        for name, groups in model.group_ranges().items()
    }


def _parsed(text: str) -> list[dict[str, Any]]:
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"cannot read parameter groups: not JSON: {error}") from None
    if not isinstance(raw, list) or not all(isinstance(group, dict) for group in raw):
        raise InvalidRequestError("cannot read parameter groups: no JSON list of objects")
    return raw


def _completed(raw: Sequence[Mapping[str, Any]], like: OptimizerSettings) -> Groups:
    if len(raw) != len(like.groups):
        raise InvalidRequestError(
            f"{like.name} has {len(raw)} parameter groups, but {len(like.groups)} in the job"
        )
    return tuple(
        _complete(f"{like.name}, group {index}", group, present)
        for index, (group, present) in enumerate(zip(raw, like.groups, strict=True))
    )


def groups_of_push(text: str, like: OptimizerSettings, tensors: Iterable[TensorSpec]) -> Groups:
    """Return a push's parameter groups: `groups_from_json` with further checks.

    tensors: the tensors of this optimizer; their `group` is an index into its own groups.

    The checks are `check_rates` and `check_numbers`.
    """
    groups = groups_from_json(text, like)
    check_rates(groups, like)
    check_numbers(OptimizerSettings(like.name, groups), tensors)
    return groups


def check_numbers(optimizer: OptimizerSettings, tensors: Iterable[TensorSpec]) -> None:
    """Raise InvalidRequestError for hyper-parameters with which a formula may fail.

    A server would stop at an update that the coordinator has decided. As in torch, schedulers may
    round a learning rate to just below zero, and SGD may have nesterov with a momentum of zero.
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
                    f"{where}: a number is too large for {dtype} weights: {problem}"
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
            and rate < -max(RATE_ROUNDING * own, MIN_RATE_ROUNDING)
        ):
            raise InvalidRequestError(
                f"push refused: the learning rate of group {index} is {rate}, below 0 "
                f"(registered: {own}). Try: correct the scheduler of the script",
                "OUT_OF_RANGE",
            )


def scalars_to_json(scalars: Scalars) -> str:
    """Return state per tensor as JSON, which keeps every bit; empty: there is none."""
    if not scalars:
        return ""
    return json.dumps({name: dict(values) for name, values in scalars.items()}, sort_keys=True)


def scalars_from_json(text: str) -> dict[str, dict[int, float]]:
    """Return the inverse of `scalars_to_json`.

    Raises:
        AttributeError, TypeError, ValueError: It has not written this text.
    """
    raw = json.loads(text) if text else {}
    return {
        name: {int(index): float(value) for index, value in values.items()}
        for name, values in raw.items()
    }


def _kind(name: str) -> OptimizerKind:
    if name not in KINDS:
        reason = next(
            (why for refused, why in REFUSED_CLASSES.items() if refused.lower() == name), ""
        )
        raise UnsupportedOptimizerError(
            f"servers cannot run {name!r}: {reason}"
            if reason
            else f"optimizer {name!r} is not one of {', '.join(sorted(KINDS))}. Try: one of "
            "these, or start every ps-server with `--optimizers MODULE`, which registers it"
        )
    return KINDS[name]


def _name_of(optimizer: torch.optim.Optimizer) -> str:
    cls = type(optimizer)
    names = [name for name, _ in kind_of_class(cls)]
    if not names:
        reason = (
            REFUSED_CLASSES.get(cls.__name__) if cls.__module__.startswith("torch.optim") else None
        )
        known = ", ".join(sorted(kind.torch_class.__name__ for kind in KINDS.values()))
        raise UnsupportedOptimizerError(
            f"servers cannot run {cls.__module__}.{cls.__qualname__}: "
            f"{reason or 'it is not registered'}. Try: one of {known} (no subclasses), or register "
            "a formula (`--optimizers MODULE`)"
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
            "servers cannot run this Adam: its groups differ in decoupled_weight_decay. Try: Adam "
            "or AdamW for all groups"
        )
    return "adamw" if decoupled == {True} else "adam"


def _refuse_unknown(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], kind: OptimizerKind
) -> None:
    # a hyper-parameter that a newer torch has added changes nothing at its default
    arguments = inspect.signature(type(optimizer)).parameters
    for key in (group.keys() & arguments.keys()) - kind.defaults.keys() - _NOT_HYPER:
        if group[key] is not arguments[key].default and group[key] != arguments[key].default:
            raise UnsupportedOptimizerError(
                f"servers cannot run torch.optim.{type(optimizer).__name__} with "
                f"{key}={group[key]!r}. Try: leave it out"
            )


def _plain(value: Any, default: Scalar) -> Any:
    """Return tensors as numbers; if the default is a boolean, the truth value."""
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
            f"{where}: unknown hyper-parameter {unknown[0]!r}. Try: one of {', '.join(defaults)}"
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
