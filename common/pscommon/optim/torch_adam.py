"""Adam and its relatives: entries for `torch_kinds`, which describes them."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamax import adamax
from torch.optim.adamw import adamw
from torch.optim.nadam import nadam
from torch.optim.radam import radam

from pscommon.core.model_spec import Scalar
from pscommon.optim.registry import (
    EVERY_DTYPE,
    Formula,
    OptimizerKind,
    OptimizerState,
    Rows,
    ScalarState,
    find_out_of_range,
)


def _adam(form: Callable[..., None]) -> Formula:
    def step(rows: Rows, gradients: list[Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group.pop("betas")
        state = [rows.state.get(name, []) for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")]
        largest = state.pop() if group["amsgrad"] else []
        form(
            rows.weights,
            gradients,
            *state[:2],
            largest,
            rows.steps,
            foreach=False,
            fused=rows.fused,
            beta1=beta1,
            beta2=beta2,
            **group,
        )

    return step


def _adamax(rows: Rows, gradients: list[Tensor], group: dict[str, Any]) -> None:
    beta1, beta2 = group.pop("betas")
    averages, largest = rows.state["exp_avg"], rows.state["exp_inf"]
    adamax(
        rows.weights,
        gradients,
        averages,
        largest,
        rows.steps,
        foreach=False,
        beta1=beta1,
        beta2=beta2,
        **group,
    )


def _nadam(rows: Rows, gradients: list[Tensor], group: dict[str, Any]) -> None:
    beta1, beta2 = group.pop("betas")
    nadam(
        rows.weights,
        gradients,
        rows.state["exp_avg"],
        rows.state["exp_avg_sq"],
        rows.scalars["mu_product"],
        rows.steps,
        foreach=False,
        beta1=beta1,
        beta2=beta2,
        **group,
    )


def _refuse_nadam(group: Mapping[str, Any]) -> str:
    # torch divides by 1 - mu_product, where mu_product is a float32 and at most betas[0]
    if problem := find_out_of_range(group):
        return problem
    if np.float32(group["betas"][0]) == 1:
        return (
            f"betas are {group['betas']}: the first is 1 in float32, and NAdam would divide by zero"
        )
    return ""


def _radam(rows: Rows, gradients: list[Tensor], group: dict[str, Any]) -> None:
    beta1, beta2 = group.pop("betas")
    averages, squares = rows.state["exp_avg"], rows.state["exp_avg_sq"]
    radam(
        rows.weights,
        gradients,
        averages,
        squares,
        rows.steps,
        foreach=False,
        beta1=beta1,
        beta2=beta2,
        **group,
    )


_ADAM = (
    OptimizerState("exp_avg"),
    OptimizerState("exp_avg_sq"),
    OptimizerState("max_exp_avg_sq", switch="amsgrad"),
)
_DEFAULTS_OF_ADAM: dict[str, Scalar] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
    "maximize": False,
}

ADAM_KINDS: Mapping[str, OptimizerKind] = {
    "adam": OptimizerKind(
        torch.optim.Adam, _DEFAULTS_OF_ADAM, _adam(adam), _ADAM, fused=EVERY_DTYPE, by_step=True
    ),
    "adamw": OptimizerKind(
        torch.optim.AdamW,
        _DEFAULTS_OF_ADAM | {"weight_decay": 1e-2},
        _adam(adamw),
        _ADAM,
        fused=EVERY_DTYPE,
        by_step=True,
    ),
    "adamax": OptimizerKind(
        torch.optim.Adamax,
        {"lr": 2e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "maximize": False},
        _adamax,
        (OptimizerState("exp_avg"), OptimizerState("exp_inf")),
        by_step=True,
    ),
    "nadam": OptimizerKind(
        torch.optim.NAdam,
        {
            "lr": 2e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0.0,
            "momentum_decay": 4e-3,
            "decoupled_weight_decay": False,
            "maximize": False,
        },
        _nadam,
        _ADAM[:2],
        (ScalarState("mu_product", 1.0),),
        by_step=True,
        check=_refuse_nadam,
    ),
    "radam": OptimizerKind(
        torch.optim.RAdam,
        {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0.0,
            "decoupled_weight_decay": False,
            "maximize": False,
        },
        _radam,
        _ADAM[:2],
        by_step=True,
    ),
}
