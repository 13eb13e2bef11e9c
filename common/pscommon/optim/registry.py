"""The table of optimizers; one entry describes an optimizer for servers and workers."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pscommon.core.model_spec import Scalar

FULL_PRECISION = frozenset({torch.float64, torch.float32})
EVERY_DTYPE = FULL_PRECISION | {torch.float16, torch.bfloat16}


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """State of an optimizer: one number per weight, in the dtype of the weights.

    Attributes:
        name: torch's key for it in `Optimizer.state`; also the kind in snapshots.
        switch: Hyper-parameter that enables it; empty: always enabled.
        initial: Hyper-parameter with its first value; empty: zero.
    """

    name: str
    switch: str = ""
    initial: str = ""


@dataclass(frozen=True, slots=True)
class ScalarState:
    """State of an optimizer: one float32 number per tensor.

    Attributes:
        name: torch's key for it in `Optimizer.state`.
        initial: Value before the tensor's first step: a number or the name of a hyper-parameter.
    """

    name: str
    initial: float | str = 0.0

    def first_value(self, group: Mapping[str, Any]) -> float:
        """Return the value before the first step of a tensor in this parameter group."""
        return float(group[self.initial] if isinstance(self.initial, str) else self.initial)


class Rows(NamedTuple):
    """The arguments of one call of a formula: flat weights of one dtype, and their state.

    Attributes:
        weights: The flat tensors.
        state: By name of an enabled OptimizerState: a tensor for each of `weights`, same shape.
        scalars: By name of a ScalarState: a float32 tensor without dimensions for each of
            `weights`.
        steps: Number of steps before this one for each of `weights`, as a float32 tensor without
            dimensions; the formula adds 1.
        fused: Use torch's fused kernel.
    """

    weights: list[Tensor]
    state: Mapping[str, list[Tensor]]
    scalars: Mapping[str, list[Tensor]]
    steps: list[Tensor]
    fused: bool = False


class Formula(Protocol):
    """The update rule of an optimizer."""

    def __call__(self, rows: Rows, gradients: list[Tensor], group: dict[str, Any], /) -> None:
        """Perform one step in place.

        Args:
            rows: Weights and state.
            gradients: One for each of `rows.weights`; read-only.
            group: The hyper-parameters; the formula may change them.
        """
        ...


Check = Callable[[Mapping[str, Any]], str]
"""Returns the problem with the hyper-parameters of a group; empty: none."""


def find_out_of_range(group: Mapping[str, Any], unbounded: frozenset[str] = frozenset()) -> str:
    """Return the problem with the first number below 0 or betas outside [0, 1); empty: none.

    unbounded: hyper-parameters that may be negative.
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

    Attributes:
        torch_class: The class that scripts use; such classes have no constructor in common.
        defaults: Each hyper-parameter with its default, whose type is the required type.
        formula: The step that servers run.
        states: State per weight.
        scalars: State per tensor.
        fused: Dtypes for which torch has a fused CPU kernel, which passes over the memory once
            instead of once per operation.
        by_step: The formula depends on the number of the step, so tensors with different numbers
            need separate calls.
        first: Hyper-parameters with another value in a tensor's first step.
        constructor_only: Hyper-parameters that torch reads from the constructor, not from
            parameter groups.
        free: Hyper-parameters that the formula only compares with step counts, so their size does
            not matter.
        check: Refuses values that torch's constructor refuses, and values with which the formula
            would raise an exception.
        source: Digest of the module that registered it; empty: built in.
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
        """Return the enabled states of a parameter group with these hyper-parameters."""
        return tuple(state for state in self.states if not state.switch or group[state.switch])

    def set_by_first_step(self, state: OptimizerState) -> bool:
        """Return whether a hyper-parameter at a tensor's first step gives the first value."""
        return bool(state.initial) and state.initial not in self.constructor_only

    @property
    def counts_steps(self) -> bool:
        """Steps of a tensor are counted even if its group has no state per weight."""
        return self.by_step or bool(self.scalars)


_KINDS: dict[str, OptimizerKind] = {}

KINDS: Mapping[str, OptimizerKind] = MappingProxyType(_KINDS)
"""The registry: every optimizer by its name on the wire. `register` adds to it."""


def add(name: str, kind: OptimizerKind) -> None:
    """Add an entry, or replace one of the same name."""
    _KINDS[name] = kind


def kind_of_class(optimizer_class: type[Any]) -> Iterator[tuple[str, OptimizerKind]]:
    """Yield the entries of a class. Subclasses have none: they may compute something else."""
    return ((name, kind) for name, kind in _KINDS.items() if kind.torch_class is optimizer_class)
