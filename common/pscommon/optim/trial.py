"""Trial runs of formulas on small tensors, before a server relies on them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pscommon.core.model_spec import Scalar
from pscommon.optim.registry import OptimizerKind, Rows

HARMLESS_SIZE = 100.0
"""Products of two numbers up to this size fit into every dtype of weights (float16: to 65504)."""


class ChangedGradientError(ValueError):
    """A formula has written to the gradient, which may be a worker's memory."""


def try_formula(
    kind: OptimizerKind,
    group: Mapping[str, Any],
    sizes: Sequence[int],
    dtype: torch.dtype = torch.float32,
    steps: int = 2,
) -> list[Tensor]:
    """Perform steps on a small tensor in parts of these sizes.

    Returns:
        The weights, each state, and for each scalar the values of the first and the last part.

    Raises:
        ChangedGradientError: The formula has written to the gradient.
        Exception: The formula failed.
    """
    weights = torch.linspace(-1.0, 1.0, sum(sizes)).to(dtype)
    gradients = torch.linspace(2.0, -3.0, sum(sizes)).to(dtype)
    original = gradients.clone()
    rows = Rows(
        [*torch.split(weights, [*sizes])],
        {
            each.name: _parts(_first_values(each.initial, group, weights), sizes)
            for each in kind.states_of(group)
        },
        {
            each.name: [torch.zeros(()).fill_(each.first_value(group)) for _ in sizes]
            for each in kind.scalars
        },
        [torch.zeros(()) for _ in sizes],
        fused=dtype in kind.fused,
    )
    with torch.no_grad():
        for _ in range(steps):
            kind.formula(rows, _parts(gradients, sizes), dict(group))
            if not torch.equal(original, gradients):
                raise ChangedGradientError("it changes the gradient")
    scalars = [column[index] for column in rows.scalars.values() for index in (0, -1)]
    return [weights, *(torch.cat(column) for column in rows.state.values()), *scalars]


def is_harmless(kind: OptimizerKind, group: Mapping[str, Scalar]) -> bool:
    """Return whether all numbers are small enough for every dtype of weights."""
    return all(_is_harmless(value) for key, value in group.items() if key not in kind.free)


def find_overflow(kind: OptimizerKind, group: Mapping[str, Scalar], dtype: torch.dtype) -> str:
    """Return torch's error for hyper-parameters that are too large for this dtype; empty: none."""
    try:
        try_formula(kind, group, [2], dtype, steps=1)  # torch fills a single number without a check
    except (ArithmeticError, RuntimeError) as error:
        return str(error) or type(error).__name__
    return ""


def _is_harmless(value: Any) -> bool:
    parts = value if isinstance(value, tuple) else (value,)
    return all(abs(part) <= HARMLESS_SIZE for part in parts)


def _first_values(initial: str, group: Mapping[str, Any], like: Tensor) -> Tensor:
    return torch.zeros_like(like).fill_(group[initial] if initial else 0.0)


def _parts(tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return [*torch.split(tensor, [*sizes])]
