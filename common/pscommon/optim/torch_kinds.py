"""The elementwise optimizers of torch.optim, by the functional forms that its classes call.

Servers do not step with the classes: the first Optimizer object of a process imports torch's
compiler, which doubles the start time of a server. `foreach=False` is what torch itself uses on
a CPU. Only Adam, AdamW, Adagrad and SGD have fused CPU kernels.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adadelta import adadelta
from torch.optim.adagrad import adagrad
from torch.optim.asgd import asgd
from torch.optim.rmsprop import rmsprop
from torch.optim.rprop import rprop
from torch.optim.sgd import sgd

from pscommon.optim.registry import (
    EVERY_DTYPE,
    FULL_PRECISION,
    OptimizerKind,
    OptimizerState,
    Rows,
    ScalarState,
    add,
    find_out_of_range,
)
from pscommon.optim.torch_adam import ADAM_KINDS

REFUSED_CLASSES: Mapping[str, str] = {
    "LBFGS": "its line search evaluates the model several times in a step and needs products of "
    "complete gradients",
    "Muon": "it orthogonalizes complete weight matrices, and a server has only parts",
    "Adafactor": "it needs row and column means of complete weight matrices, and a server has only "
    "parts",
    "SparseAdam": "it supports only sparse gradients, and servers only dense ones",
}
"""Classes of torch.optim that servers cannot run, and why: they are not elementwise."""


def _sgd(rows: Rows, gradients: list[Tensor], group: dict[str, Any]) -> None:
    buffers: list[Tensor | None] = [*rows.state.get("momentum_buffer", ())]
    sgd(rows.weights, gradients, buffers, foreach=False, fused=rows.fused, **group)


def _refuse_sgd(group: Mapping[str, Any]) -> str:
    if group.get("nesterov") and (group["momentum"] == 0 or group["dampening"] != 0):
        return "nesterov needs a momentum, and no dampening"
    return find_out_of_range(group, frozenset({"dampening"}))


def _adagrad(rows: Rows, gradients: list[Tensor], group: dict[str, Any]) -> None:
    del group["initial_accumulator_value"]  # it is in the state
    adagrad(
        rows.weights,
        gradients,
        rows.state["sum"],
        rows.steps,
        foreach=False,
        fused=rows.fused,
        **group,
    )


def _rmsprop(rows: Rows, gradients: list[Tensor], group: dict[str, Any]) -> None:
    names = ("square_avg", "grad_avg", "momentum_buffer")
    averages, centers, buffers = (rows.state.get(name, []) for name in names)
    rmsprop(rows.weights, gradients, averages, centers, buffers, rows.steps, foreach=False, **group)


def _adadelta(rows: Rows, gradients: list[Tensor], group: dict[str, Any]) -> None:
    squares, deltas = rows.state["square_avg"], rows.state["acc_delta"]
    adadelta(rows.weights, gradients, squares, deltas, rows.steps, foreach=False, **group)


def _refuse_adadelta(group: Mapping[str, Any]) -> str:
    return f"rho is {group['rho']}, above 1" if group["rho"] > 1 else find_out_of_range(group)


def _rprop(rows: Rows, gradients: list[Tensor], group: dict[str, Any]) -> None:
    smaller, larger = group["etas"]
    smallest, largest = group["step_sizes"]
    rprop(
        rows.weights,
        gradients,
        rows.state["prev"],
        rows.state["step_size"],
        rows.steps,
        foreach=False,
        step_size_min=smallest,
        step_size_max=largest,
        etaminus=smaller,
        etaplus=larger,
        maximize=group["maximize"],
    )


def _refuse_rprop(group: Mapping[str, Any]) -> str:
    smaller, larger = group["etas"]
    if not 0 < smaller < 1 < larger:
        return f"etas are {group['etas']}, not one between 0 and 1 and one above 1"
    return find_out_of_range(group)


def _asgd(rows: Rows, gradients: list[Tensor], group: dict[str, Any]) -> None:
    # a scheduler may round a learning rate to just below zero, of which the formula takes a root
    group["lr"] = max(0.0, group["lr"])
    asgd(
        rows.weights,
        gradients,
        rows.state["ax"],
        rows.scalars["mu"],
        rows.scalars["eta"],
        rows.steps,
        foreach=False,
        **group,
    )


def _refuse_asgd(group: Mapping[str, Any]) -> str:
    # torch computes lr / (1 + lambd * lr * step) ** alpha with Python's numbers, which may raise
    if group["alpha"] > 1:
        return f"alpha is {group['alpha']}, above 1"
    return find_out_of_range(group, frozenset({"t0"}))


_MOMENTUM = OptimizerState("momentum_buffer", switch="momentum")

TORCH_KINDS: Mapping[str, OptimizerKind] = {
    "sgd": OptimizerKind(
        torch.optim.SGD,
        {
            "lr": 1e-3,
            "momentum": 0.0,
            "dampening": 0.0,
            "weight_decay": 0.0,
            "nesterov": False,
            "maximize": False,
        },
        _sgd,
        (_MOMENTUM,),
        # torch 2.13 leaves 16-bit weights as they are:
        # https://github.com/pytorch/pytorch/issues/191763
        fused=FULL_PRECISION,
        # torch starts the buffer as a copy of the first gradient: an undamped step from zero
        first={"dampening": 0.0},
        check=_refuse_sgd,
    ),
    "adagrad": OptimizerKind(
        torch.optim.Adagrad,
        {
            "lr": 1e-2,
            "lr_decay": 0.0,
            "weight_decay": 0.0,
            "initial_accumulator_value": 0.0,
            "eps": 1e-10,
            "maximize": False,
        },
        _adagrad,
        (OptimizerState("sum", initial="initial_accumulator_value"),),
        fused=EVERY_DTYPE,
        by_step=True,
        constructor_only=frozenset({"initial_accumulator_value"}),
    ),
    "rmsprop": OptimizerKind(
        torch.optim.RMSprop,
        {
            "lr": 1e-2,
            "alpha": 0.99,
            "eps": 1e-8,
            "weight_decay": 0.0,
            "momentum": 0.0,
            "centered": False,
            "maximize": False,
        },
        _rmsprop,
        (OptimizerState("square_avg"), _MOMENTUM, OptimizerState("grad_avg", switch="centered")),
    ),
    "adadelta": OptimizerKind(
        torch.optim.Adadelta,
        {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0, "maximize": False},
        _adadelta,
        (OptimizerState("square_avg"), OptimizerState("acc_delta")),
        check=_refuse_adadelta,
    ),
    "rprop": OptimizerKind(
        torch.optim.Rprop,
        {"lr": 1e-2, "etas": (0.5, 1.2), "step_sizes": (1e-6, 50.0), "maximize": False},
        _rprop,
        (OptimizerState("prev"), OptimizerState("step_size", initial="lr")),
        check=_refuse_rprop,
    ),
    "asgd": OptimizerKind(
        torch.optim.ASGD,
        {
            "lr": 1e-2,
            "lambd": 1e-4,
            "alpha": 0.75,
            "t0": 1e6,
            "weight_decay": 0.0,
            "maximize": False,
        },
        _asgd,
        (OptimizerState("ax"),),
        (ScalarState("eta", "lr"), ScalarState("mu", 1.0)),
        by_step=True,
        free=frozenset({"t0"}),
        check=_refuse_asgd,
    ),
    **ADAM_KINDS,
}

for name, kind in TORCH_KINDS.items():
    add(name, kind)
