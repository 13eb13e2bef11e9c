"""Optimizers of users: `register` adds a class with a formula for one tensor."""

import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from pscommon.core.errors import InvalidRequestError, MismatchError
from pscommon.core.model_spec import Scalar
from pscommon.optim.registry import (
    KINDS,
    Check,
    Formula,
    OptimizerKind,
    OptimizerState,
    Rows,
    ScalarState,
    add,
    find_out_of_range,
)
from pscommon.optim.trial import try_formula
from pscommon.system.imports import import_user_module

TensorFormula = Callable[[Tensor, Tensor, Mapping[str, Any], Mapping[str, Any]], None]
"""formula(weight, gradient, state, group): one step of one flat tensor in place."""

IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Constructor arguments of torch that choose an implementation and do not change the result."""

FLOATS_PER_ALIGNMENT = 16
"""Number of float32 values in 64 bytes, the alignment at which shards divide tensors."""


def register(
    optimizer_class: type[torch.optim.Optimizer],
    formula: TensorFormula,
    *,
    states: Sequence[str] = (),
    scalars: Mapping[str, float] = MappingProxyType({}),
    check: Check = find_out_of_range,
) -> None:
    """Register a formula for an optimizer class, so that servers can run it.

    Call it in a module that every ps-server and ps-worker gets as `--optimizers MODULE`. Servers
    import the class but never instantiate it. A second call with the same class replaces its
    entry.

    Args:
        optimizer_class: Class that scripts hand to `job.optimizer`. Its constructor takes the
            parameters, then hyper-parameters with defaults (bool, number or tuple of numbers),
            and passes the same names to torch's constructor. With the base class
            `ElementwiseOptimizer`, step() runs the formula in local training too.
        formula: `formula(weight, gradient, state, group)` performs one step in place on a flat
            tensor of any floating dtype. It must be elementwise, because a tensor may lie on
            several servers, and a server calls it for parts of 1 MiB. `gradient` is read-only.
            `state` has the tensors named in `states`; the numbers named in `scalars` as float32
            tensors without dimensions, to be changed in place; and `step`, the number of this
            step of the tensor, from 1. `group` has the current hyper-parameters.
        states: Names of the values stored for each weight, in its dtype, initially zero.
        scalars: Names and first values of numbers stored once per tensor. All parts of a tensor
            must compute the same new value: it may depend on `group`, `state["step"]` and itself,
            not on weights or gradients.
        check: Returns the problem with the hyper-parameters of a group; empty: none. The
            default refuses negative numbers and `betas` outside [0, 1).

    Raises:
        InvalidRequestError: The name is taken, a default is no number, or the formula is not
            elementwise.
    """
    source = _digest_of_source(optimizer_class)
    add_formula(
        optimizer_class, formula, states=states, scalars=scalars, check=check, source=source
    )


def add_formula(
    optimizer_class: type[torch.optim.Optimizer],
    formula: TensorFormula,
    *,
    states: Sequence[str] = (),
    scalars: Mapping[str, float] = MappingProxyType({}),
    check: Check = find_out_of_range,
    source: str = "",
) -> None:
    """As `register`; source: digest of the module, empty for a built-in optimizer."""
    name = optimizer_class.__name__.lower()
    kind = OptimizerKind(
        optimizer_class,
        _defaults_of(optimizer_class),
        _for_each(formula),
        tuple(OptimizerState(each) for each in states),
        tuple(ScalarState(each, first) for each, first in scalars.items()),
        by_step=True,
        check=check,
        source=source,
    )
    if source:
        _check_names(name, kind)
        _check_elementwise(optimizer_class.__name__, kind)
    add(name, kind)


def load_module(module: str) -> None:
    """Import the module that an operator named with `--optimizers`.

    Raises:
        InvalidRequestError: It is missing, cannot be imported, or registers no optimizer.
    """
    import_user_module("--optimizers", module)
    if not any(kind.source for kind in KINDS.values()):
        raise InvalidRequestError(
            f"`--optimizers {module}` failed: it registers no optimizer. Try: call "
            "pscommon.optim.register in it"
        )


def digest_of_user_defined() -> str:
    """Return names and a digest of the user-defined optimizers; empty: there are none.

    The digest covers hyper-parameters, states, and the source of the modules that define them.
    So the text is equal on servers with the same user-defined optimizers.
    """
    kinds = {name: kind for name, kind in sorted(KINDS.items()) if kind.source}
    rows = [
        f"{name} {kind.defaults} {kind.states} {kind.scalars} {kind.source}"
        for name, kind in kinds.items()
    ]
    return f"{','.join(kinds)} ({_digest(rows)})" if kinds else ""


def check_same_optimizers(other: str, theirs: str, this: str) -> None:
    """Raise MismatchError (SHARD_MISMATCH) if another server has other user-defined optimizers.

    theirs: Its `digest_of_user_defined`. `other` and `this` name the servers.
    """
    mine = digest_of_user_defined()
    if theirs != mine:
        raise MismatchError(
            f"{other} and {this} have different `--optimizers`: {theirs or 'none'} and "
            f"{mine or 'none'}. Try: start every server with the same module, of the same version",
            "SHARD_MISMATCH",
        )


def _digest_of_source(optimizer_class: type[Any]) -> str:
    try:
        source = inspect.getsource(sys.modules[optimizer_class.__module__])
    except (OSError, TypeError, KeyError):  # defined in an interactive session
        source = ""
    return _digest([source])


def _digest(rows: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:12]


def _for_each(formula: TensorFormula) -> Formula:
    def step(rows: Rows, gradients: list[Tensor], group: dict[str, Any]) -> None:
        columns = {**rows.state, **rows.scalars}
        for index, (weight, gradient) in enumerate(zip(rows.weights, gradients, strict=True)):
            rows.steps[index] += 1
            state = {name: column[index] for name, column in columns.items()}
            formula(weight, gradient, state | {"step": int(rows.steps[index])}, group)

    return step


def _defaults_of(optimizer_class: type[Any]) -> dict[str, Scalar]:
    """Return the hyper-parameters of a constructor with their defaults, numbers as floats."""
    _, *arguments = inspect.signature(optimizer_class).parameters.values()
    found: dict[str, Scalar] = {}
    for argument in arguments:
        if argument.name in IMPLEMENTATION:
            continue
        value = argument.default
        is_plain = isinstance(value, bool | int | float)
        if not is_plain and not (
            isinstance(value, tuple) and all(isinstance(part, int | float) for part in value)
        ):
            raise InvalidRequestError(
                f"cannot register {optimizer_class.__name__}: {argument.name} of its constructor "
                "has no valid default. Try: a bool, a number or a tuple of numbers"
            )
        found[argument.name] = (
            tuple(map(float, value)) if isinstance(value, tuple) else _as_float(value)
        )
    return found


def _as_float(value: bool | int | float) -> bool | float:
    return value if isinstance(value, bool) else float(value)


def _check_names(name: str, kind: OptimizerKind) -> None:
    present = KINDS.get(name)
    shown = kind.torch_class.__name__
    if present is not None and _identity(present.torch_class) != _identity(kind.torch_class):
        raise InvalidRequestError(
            f"cannot register {shown}: the name {name} belongs to "
            f"{'.'.join(_identity(present.torch_class))}. Try: rename the class"
        )
    names = [each.name for each in kind.states] + [each.name for each in kind.scalars]
    bad = [each for each in names if not each.isidentifier() or each in ("weight", "step")]
    if bad or len(set(names)) < len(names):
        raise InvalidRequestError(
            f"cannot register {shown}: states and scalars {names} have invalid names. Try: "
            "different Python identifiers, other than `weight` and `step`"
        )


def _identity(optimizer_class: type[Any]) -> tuple[str, str]:
    return optimizer_class.__module__, optimizer_class.__qualname__


def _check_elementwise(shown: str, kind: OptimizerKind) -> None:
    """Compare two steps on a complete tensor with the same steps on its parts."""
    count = 3 * FLOATS_PER_ALIGNMENT
    try:
        complete = try_formula(kind, kind.defaults, [count])
        parts = try_formula(
            kind, kind.defaults, [FLOATS_PER_ALIGNMENT, count - FLOATS_PER_ALIGNMENT]
        )
    except Exception as error:
        raise InvalidRequestError(
            f"cannot register {shown}: its formula failed on {count} float32 numbers: {error!r}"
        ) from error
    if not all(
        torch.allclose(*pair, rtol=1e-4, atol=1e-6, equal_nan=True)
        for pair in zip(complete, parts, strict=True)
    ):
        raise InvalidRequestError(
            f"cannot register {shown}: its formula is not elementwise, and servers store parts of "
            "tensors. Try: a formula that treats each element by itself"
        )
