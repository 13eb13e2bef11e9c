"""The table of optimizers: one entry has all that servers and workers know of an optimizer."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pscommon.core.model_spec import Scalar


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """Numbers that an optimizer keeps for each weight, in the dtype of the weights.

    name: torch's key for it in `Optimizer.state`; also the kind in snapshots.
    switch: the hyper-parameter that enables it; empty: it is always kept.
    initial: the hyper-parameter that gives its first value; empty: zero.
    """

    name: str
    switch: str = ""
    initial: str = ""


@dataclass(frozen=True, slots=True)
class ScalarState:
    """One float32 number that an optimizer keeps for each tensor.

    name: torch's key for it in `Optimizer.state`.
    initial: its value before the tensor's first step: a number, or the name of a hyper-parameter.
    """

    name: str
    initial: float | str = 0.0

    def first_value(self, group: Mapping[str, Any]) -> float:
        """Return the value before the first step of a tensor in this parameter group."""
        return float(group[self.initial] if isinstance(self.initial, str) else self.initial)


class Rows(NamedTuple):
    """What one call of a formula steps: flat weights of one dtype, each with its state.

    weights: the flat tensors. state: for each OptimizerState that is kept, a tensor beside each
    of `weights`. scalars: for each ScalarState, a float32 tensor without dimensions for each of
    `weights`. steps: the steps before this one, a float32 tensor without dimensions for each;
    the formula adds 1. fused: whether torch's fused kernel is to be used.
    """

    weights: list[Tensor]
    state: Mapping[str, list[Tensor]]
    scalars: Mapping[str, list[Tensor]]
    steps: list[Tensor]
    fused: bool = False


Formula = Callable[[Rows, list[Tensor], dict[str, Any]], None]
"""Performs one step in place: rows, a gradient for each (read-only), and the hyper-parameters
(its own copy).
"""

Check = Callable[[Mapping[str, Any]], str]
"""Returns what is wrong with the hyper-parameters of a group, or an empty text."""


def find_out_of_range(group: Mapping[str, Any], unbounded: frozenset[str] = frozenset()) -> str:
    """Return the first number that is below 0, or the first betas outside [0, 1); empty: there
    is none.
    """
    for key, value in group.items():
        if key in unbounded:
            continue
        if key == "betas":
            if not all(0 <= beta < 1 for beta in value):
                return f"betas are {value}, not at least 0 and below 1"
        elif not isinstance(value, tuple) and value < 0:
            return f"{key} is {value}, below 0"
    return ""


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """One optimizer.

    torch_class: the class that scripts use; such classes have no constructor in common.
    defaults: each hyper-parameter with its default, whose type is the required type. formula:
    the step that servers carry out. states: what is kept for each weight. scalars: what is kept
    for each tensor. fused: dtypes with a fused CPU kernel in torch, which passes over the memory
    once instead of once per operation. by_step: the number of the step enters the formula, so
    tensors with different counts need a call each. first: hyper-parameters with another value in
    a tensor's first step. constructor_only: hyper-parameters that torch reads from the
    constructor and not from parameter groups. free: hyper-parameters that the formula only
    compares with step counts, so their size does not matter. check: refuses values that torch's
    constructor refuses, or with which the formula would raise an exception. source: digest of
    the module that registered it; empty: it is built in.
    """

    torch_class: type[Any]
    defaults: Mapping[str, Scalar]
    formula: Formula
    states: tuple[OptimizerState, ...]
    scalars: tuple[ScalarState, ...] = ()
    fused: frozenset[torch.dtype] = frozenset()
    by_step: bool = False
    first: Mapping[str, Scalar] = field(default_factory=dict)
    constructor_only: frozenset[str] = frozenset()
    free: frozenset[str] = frozenset()
    check: Check = find_out_of_range
    source: str = ""

    def states_of(self, group: Mapping[str, Scalar]) -> tuple[OptimizerState, ...]:
        """Return what is kept for the weights of a parameter group with these hyper-parameters."""
        return tuple(state for state in self.states if not state.switch or group[state.switch])

    def set_by_first_step(self, state: OptimizerState) -> bool:
        """Whether the state's first value is the hyper-parameter at the time of a tensor's first
        step.
        """
        return bool(state.initial) and state.initial not in self.constructor_only

    @property
    def counts_steps(self) -> bool:
        """Whether steps count where a group keeps no state (those of SGD without momentum do
        not).
        """
        return self.by_step or bool(self.scalars)


_KINDS: dict[str, OptimizerKind] = {}

KINDS: Mapping[str, OptimizerKind] = MappingProxyType(_KINDS)
"""Every optimizer by its name on the wire. A live view: `register` adds to it."""


def add(name: str, kind: OptimizerKind) -> None:
    """Add an entry, or replace one of the same name."""
    _KINDS[name] = kind


def kind_of_class(optimizer_class: type[Any]) -> Iterator[tuple[str, OptimizerKind]]:
    """Yield the entries of a class; subclasses have none, because they may compute something
    else.
    """
    return ((name, kind) for name, kind in _KINDS.items() if kind.torch_class is optimizer_class)
