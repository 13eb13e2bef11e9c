"""Base class of optimizers whose local step runs the formula that servers run."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pscommon.core.errors import UnsupportedOptimizerError
from pscommon.optim.registry import OptimizerKind, Rows, kind_of_class


class ElementwiseOptimizer(torch.optim.Optimizer):
    """Base class of optimizers that `register` adds: step() runs the registered formula.

    A subclass needs only a constructor, which passes the parameters and a dict of all
    hyper-parameters to `super().__init__`.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one step on every parameter with a gradient.

        Args:
            closure: Evaluates the model and returns the loss, as in torch.

        Returns:
            The loss of the closure, or None.

        Raises:
            UnsupportedOptimizerError: The class is not registered.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        kind = next((kind for _, kind in kind_of_class(type(self))), None)
        if kind is None:
            raise UnsupportedOptimizerError(
                f"{type(self).__qualname__} cannot step: it has no formula. Try: "
                f"`pscommon.optim.register({type(self).__qualname__}, formula)`, once, in the "
                "module that defines it"
            )
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _step(kind, parameter, self.state[parameter], group)
        return loss


def _step(
    kind: OptimizerKind, parameter: Tensor, state: dict[str, Any], group: Mapping[str, Any]
) -> None:
    if (
        parameter.grad is None
        or parameter.grad.layout is not torch.strided
        or parameter.is_complex()
    ):
        raise RuntimeError(f"{kind.torch_class.__name__} supports only dense real gradients")
    hyper = {key: _plain(group[key]) for key in kind.defaults}
    if "step" not in state:
        state["step"] = torch.zeros(())
        state |= {each.name: torch.tensor(each.first_value(hyper)) for each in kind.scalars}
    states = kind.states_of(hyper)
    for each in states:
        if each.name not in state:
            state[each.name] = torch.full_like(
                parameter, hyper[each.initial] if each.initial else 0.0
            )
    columns = {each.name: [state[each.name]] for each in states}
    scalars = {each.name: [state[each.name]] for each in kind.scalars}
    first = kind.first if state["step"] == 0 else {}
    kind.formula(
        Rows([parameter], columns, scalars, [state["step"]]), [parameter.grad], {**hyper, **first}
    )


def _plain(value: Any) -> Any:
    """Return the number in a tensor; schedulers may keep learning rates as tensors."""
    return value.item() if isinstance(value, Tensor) else value
