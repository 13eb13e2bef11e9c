"""The elementwise optimizers of torch.optim, by the functional forms that its classes call.

Servers do not step with the classes: the first Optimizer object of a process imports torch's
compiler, which doubles the start time of a server. `foreach=False` is what torch itself uses on
a CPU. Only Adam, AdamW, Adagrad and SGD have fused CPU kernels.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.adadelta import adadelta
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamax import adamax
from torch.optim.adamw import adamw
from torch.optim.asgd import asgd
from torch.optim.nadam import nadam
from torch.optim.radam import radam
from torch.optim.rmsprop import rmsprop
from torch.optim.rprop import rprop
from torch.optim.sgd import sgd

from pscommon.core.model_spec import Scalar
from pscommon.optim.registry import (
    EVERY_DTYPE,
    FULL_PRECISION,
    Formula,
    OptimizerKind,
    OptimizerState,
    Rows,
    ScalarState,
    add,
    find_out_of_range,
)

REFUSED_CLASSES: Mapping[str, str] = {
    "LBFGS": "its line search evaluates the model several times in a step and needs products of "
    "complete gradients",
    "Muon": "it orthogonalizes complete weight matrices, and a server has only parts",
    "Adafactor": "it needs row and column means of complete weight matrices, and a server has only "
    "parts",
    "SparseAdam": "it supports only sparse gradients, and servers only dense ones",
}
"""Classes of torch.optim that servers cannot run, and why: they are not elementwise."""


def _formula(form: Callable[..., None], *columns: str, is_fused: bool = False) -> Formula:
    """Return the formula of a functional form whose keywords are hyper-parameters.

    Args:
        form: The function of torch.
        columns: Names of its state, in the order of its arguments; one that is not enabled is
            empty.
        is_fused: It has a fused kernel.
    """

    def step(rows: Rows, gradients: list[Tensor], group: dict[str, Any]) -> None:
        state = {**rows.state, **rows.scalars}
        if "betas" in group:
            group["beta1"], group["beta2"] = group.pop("betas")
        if is_fused:
            group["fused"] = rows.fused
        columns_of_form = [state.get(name, []) for name in columns]
        form(rows.weights, gradients, *columns_of_form, rows.steps, foreach=False, **group)

    return step


def _sgd(rows: Rows, gradients: list[Tensor], group: dict[str, Any]) -> None:
    buffers: list[Tensor | None] = [*rows.state.get("momentum_buffer", ())]
    sgd(rows.weights, gradients, buffers, foreach=False, fused=rows.fused, **group)


def _refuse_sgd(group: Mapping[str, Any]) -> str:
    if group.get("nesterov") and (group["momentum"] == 0 or group["dampening"] != 0):
        return "nesterov needs a momentum, and no dampening"
    return find_out_of_range(group, frozenset({"dampening"}))


def _adagrad(rows: Rows, gradients: list[Tensor], group: dict[str, Any]) -> None:
    del group["initial_accumulator_value"]  # it is in the state
    _ADAGRAD(rows, gradients, group)


def _refuse_adadelta(group: Mapping[str, Any]) -> str:
    return f"rho is {group['rho']}, above 1" if group["rho"] > 1 else find_out_of_range(group)


def _rprop(rows: Rows, gradients: list[Tensor], group: dict[str, Any]) -> None:
    del group["lr"]  # the first step size is in the state
    group["etaminus"], group["etaplus"] = group.pop("etas")
    group["step_size_min"], group["step_size_max"] = group.pop("step_sizes")
    _RPROP(rows, gradients, group)


def _refuse_rprop(group: Mapping[str, Any]) -> str:
    smaller, larger = group["etas"]
    if not 0 < smaller < 1 < larger:
        return f"etas are {group['etas']}, not one between 0 and 1 and one above 1"
    return find_out_of_range(group)


def _asgd(rows: Rows, gradients: list[Tensor], group: dict[str, Any]) -> None:
    # a scheduler may round a learning rate to just below zero, of which the formula takes a root
    group["lr"] = max(0.0, group["lr"])
    _ASGD(rows, gradients, group)


def _refuse_asgd(group: Mapping[str, Any]) -> str:
    # torch computes lr / (1 + lambd * lr * step) ** alpha with Python's numbers, which may raise
    if group["alpha"] > 1:
        return f"alpha is {group['alpha']}, above 1"
    return find_out_of_range(group, frozenset({"t0"}))


def _refuse_nadam(group: Mapping[str, Any]) -> str:
    # torch divides by 1 - mu_product, where mu_product is a float32 and at most betas[0]
    if problem := find_out_of_range(group):
        return problem
    if np.float32(group["betas"][0]) == 1:
        return (
            f"betas are {group['betas']}: the first is 1 in float32, and NAdam would divide by zero"
        )
    return ""


_ADAGRAD = _formula(adagrad, "sum", is_fused=True)
_RPROP = _formula(rprop, "prev", "step_size")
_ASGD = _formula(asgd, "ax", "mu", "eta")
_MOMENTUM = OptimizerState("momentum_buffer", switch="momentum")
_ADAM = (
    OptimizerState("exp_avg"),
    OptimizerState("exp_avg_sq"),
    OptimizerState("max_exp_avg_sq", switch="amsgrad"),
)
_NAMES_OF_ADAM = tuple(state.name for state in _ADAM)
_HYPER_OF_ADAM: dict[str, Scalar] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
}
_DEFAULTS_OF_ADAM = {**_HYPER_OF_ADAM, "amsgrad": False, "maximize": False}

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
        _formula(rmsprop, "square_avg", "grad_avg", "momentum_buffer"),
        (OptimizerState("square_avg"), _MOMENTUM, OptimizerState("grad_avg", switch="centered")),
    ),
    "adadelta": OptimizerKind(
        torch.optim.Adadelta,
        {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0, "maximize": False},
        _formula(adadelta, "square_avg", "acc_delta"),
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
    "adam": OptimizerKind(
        torch.optim.Adam,
        _DEFAULTS_OF_ADAM,
        _formula(adam, *_NAMES_OF_ADAM, is_fused=True),
        _ADAM,
        fused=EVERY_DTYPE,
        by_step=True,
    ),
    "adamw": OptimizerKind(
        torch.optim.AdamW,
        _DEFAULTS_OF_ADAM | {"weight_decay": 1e-2},
        _formula(adamw, *_NAMES_OF_ADAM, is_fused=True),
        _ADAM,
        fused=EVERY_DTYPE,
        by_step=True,
    ),
    "adamax": OptimizerKind(
        torch.optim.Adamax,
        {**_HYPER_OF_ADAM, "lr": 2e-3, "maximize": False},
        _formula(adamax, "exp_avg", "exp_inf"),
        (OptimizerState("exp_avg"), OptimizerState("exp_inf")),
        by_step=True,
    ),
    "nadam": OptimizerKind(
        torch.optim.NAdam,
        {
            **_HYPER_OF_ADAM,
            "lr": 2e-3,
            "momentum_decay": 4e-3,
            "decoupled_weight_decay": False,
            "maximize": False,
        },
        _formula(nadam, "exp_avg", "exp_avg_sq", "mu_product"),
        _ADAM[:2],
        (ScalarState("mu_product", 1.0),),
        by_step=True,
        check=_refuse_nadam,
    ),
    "radam": OptimizerKind(
        torch.optim.RAdam,
        {**_HYPER_OF_ADAM, "decoupled_weight_decay": False, "maximize": False},
        _formula(radam, "exp_avg", "exp_avg_sq"),
        _ADAM[:2],
        by_step=True,
    ),
}

for name, kind in TORCH_KINDS.items():
    add(name, kind)
