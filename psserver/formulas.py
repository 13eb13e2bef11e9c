"""torch's optimizers as formulas: the functional forms that torch.optim's classes call themselves, all called alike.

Without the classes, because the first Optimizer object of a process imports torch's compiler. That takes half as long
as all else that a server does at its start, and a server that was killed has workers who wait.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.rmsprop import rmsprop
from torch.optim.sgd import sgd


class Rows(NamedTuple):
    """What one call steps: weights of one dtype, and for each of them its state, by torch's name of it.

    steps: how many steps each has behind it, float32 scalars; torch counts them on. fused: in one pass over the memory.
    """

    weights: list[Tensor]
    state: Mapping[str, list[Tensor]]
    steps: list[Tensor]
    fused: bool


Formula = Callable[[Rows, list[Tensor], dict[str, Any]], None]
"""One step in place: the rows, a gradient for each, and all hyper-parameters, which are the formula's to take apart."""


def _sgd(rows: Rows, gradients: list[Tensor], group: dict[str, Any]) -> None:
    buffers: list[Tensor | None] = [*rows.state.get("momentum_buffer", ())]
    sgd(rows.weights, gradients, buffers, foreach=False, fused=rows.fused, **group)


def _adam(form: Callable[..., None]) -> Formula:
    def step(rows: Rows, gradients: list[Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group.pop("betas")
        state = [rows.state.get(name, []) for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")]
        largest = state.pop() if group["amsgrad"] else []
        form(
            rows.weights, gradients, *state[:2], largest, rows.steps,
            foreach=False, fused=rows.fused, beta1=beta1, beta2=beta2, **group,
        )  # fmt: skip

    return step


def _adagrad(rows: Rows, gradients: list[Tensor], group: dict[str, Any]) -> None:
    del group["initial_accumulator_value"]  # it is in the state
    adagrad(rows.weights, gradients, rows.state["sum"], rows.steps, foreach=False, fused=rows.fused, **group)


def _rmsprop(rows: Rows, gradients: list[Tensor], group: dict[str, Any]) -> None:
    averages, centers, buffers = (rows.state.get(name, []) for name in ("square_avg", "grad_avg", "momentum_buffer"))
    rmsprop(rows.weights, gradients, averages, centers, buffers, rows.steps, foreach=False, **group)


FORMULAS: Mapping[str, Formula] = MappingProxyType(
    {"sgd": _sgd, "adam": _adam(adam), "adamw": _adam(adamw), "adagrad": _adagrad, "rmsprop": _rmsprop}
)
