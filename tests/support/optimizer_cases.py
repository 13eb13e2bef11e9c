"""Hyper-parameters for the tests of every built-in optimizer; new ones are added only here.

`tests/law/test_recipes.py` checks that each optimizer has its cases, and that these change each of
its hyper-parameters.
"""

from dataclasses import dataclass, field
from typing import Any

from pscommon.optim import KINDS

Group = dict[str, Any]


@dataclass(frozen=True)
class OptimizerCases:
    """The cases of one optimizer.

    Attributes:
        default: Few hyper-parameters; the others have their defaults.
        variants: Parameter groups; together they change every hyper-parameter.
        training: Hyper-parameters for 105 steps of a small network, whose float32 weights then are
            within 1e-6 of those of torch.
        in_16_bits: Changes of `default` for 10 steps of 16-bit weights, which move by more than 1 %
            and less than their rounding apart from float64.
    """

    default: Group
    variants: list[list[Group]]
    training: Group
    in_16_bits: Group = field(default_factory=dict)


CASES: dict[str, OptimizerCases] = {
    "sgd": OptimizerCases(
        default={"lr": 0.05},
        variants=[
            [{"lr": 0.05, "momentum": 0.9}],
            [{"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2}],
            [{"lr": 0.05, "momentum": 0.8, "dampening": 0.3, "maximize": True}],
            [
                {"lr": 0.05, "momentum": 0.9},
                {"lr": 0.01},
                {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.1},
            ],
        ],
        training={"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
    ),
    "adam": OptimizerCases(
        default={"lr": 1e-3},
        variants=[
            [{"lr": 1e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 1e-2}],
            [{"lr": 1e-3, "amsgrad": True}, {"lr": 2e-3, "maximize": True}],
        ],
        training={"lr": 2e-3, "betas": (0.8, 0.99), "weight_decay": 1e-3, "amsgrad": True},
    ),
    "adamw": OptimizerCases(
        default={"lr": 1e-3},
        variants=[
            [
                {"lr": 1e-3, "weight_decay": 0.1, "amsgrad": True},
                {"lr": 2e-3, "weight_decay": 0.0},
            ],
            [{"lr": 1e-3, "betas": (0.8, 0.95), "eps": 1e-6}, {"lr": 2e-3, "maximize": True}],
        ],
        training={"lr": 2e-3, "weight_decay": 0.1},
    ),
    "adagrad": OptimizerCases(
        default={"lr": 1e-2},
        variants=[
            [{"lr": 1e-2, "lr_decay": 1e-2, "weight_decay": 1e-2, "eps": 1e-8}],
            [{"lr": 1e-2, "initial_accumulator_value": 0.5, "maximize": True}],
        ],
        training={"lr": 1e-2, "lr_decay": 1e-3, "initial_accumulator_value": 0.1},
    ),
    "rmsprop": OptimizerCases(
        default={"lr": 1e-3},
        variants=[
            [{"lr": 1e-3, "alpha": 0.9, "momentum": 0.9, "weight_decay": 1e-2}],
            [
                {"lr": 1e-3, "centered": True, "eps": 1e-3},
                {"lr": 5e-4, "momentum": 0.5, "maximize": True},
            ],
            [{"lr": 1e-3, "centered": True, "momentum": 0.9, "eps": 1e-3}],
        ],
        training={"lr": 1e-3, "momentum": 0.5, "centered": True, "eps": 1e-4},
    ),
    "adadelta": OptimizerCases(
        default={"lr": 0.5},
        variants=[
            [
                {"lr": 0.5, "rho": 0.8, "eps": 1e-4, "weight_decay": 1e-2},
                {"lr": 1.0, "maximize": True},
            ],
        ],
        training={"lr": 0.5, "rho": 0.8, "eps": 1e-4, "weight_decay": 1e-3},
    ),
    "adamax": OptimizerCases(
        default={"lr": 1e-3},
        variants=[
            [
                {"lr": 1e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 1e-2},
                {"lr": 2e-3, "maximize": True},
            ],
        ],
        training={"lr": 2e-3, "betas": (0.8, 0.99), "weight_decay": 1e-3, "eps": 1e-4},
    ),
    "nadam": OptimizerCases(
        default={"lr": 1e-3},
        variants=[
            [
                {"lr": 1e-3, "momentum_decay": 0.1, "weight_decay": 1e-2},
                {"lr": 2e-3, "maximize": True},
            ],
            [
                {"lr": 1e-3, "decoupled_weight_decay": True, "weight_decay": 0.1, "eps": 1e-6},
                {"lr": 1e-3, "betas": (0.5, 0.9)},
            ],
        ],
        training={
            "lr": 2e-3,
            "momentum_decay": 0.05,
            "weight_decay": 0.1,
            "decoupled_weight_decay": True,
            "eps": 1e-4,
        },
        in_16_bits={"lr": 5e-3, "betas": (0.9, 0.99)},
    ),
    "radam": OptimizerCases(
        default={"lr": 1e-3},
        variants=[
            [
                {"lr": 1e-3, "betas": (0.9, 0.9), "weight_decay": 1e-2},
                {"lr": 2e-3, "maximize": True},
            ],
            [
                {"lr": 1e-3, "decoupled_weight_decay": True, "weight_decay": 0.1, "eps": 1e-6},
                {"lr": 1e-3, "betas": (0.5, 0.8)},
            ],
        ],
        training={"lr": 2e-3, "betas": (0.9, 0.9), "weight_decay": 1e-3, "eps": 1e-4},
        in_16_bits={"lr": 0.02},
    ),
    "rprop": OptimizerCases(
        default={"lr": 1e-3},
        variants=[
            [
                {"lr": 1e-3, "etas": (0.7, 1.1), "step_sizes": (1e-4, 0.01)},
                {"lr": 1e-2, "maximize": True},
            ],
        ],
        training={"lr": 1e-4, "step_sizes": (1e-6, 1e-3)},
    ),
    "asgd": OptimizerCases(
        default={"lr": 1e-2},
        variants=[
            [
                {"lr": 1e-2, "lambd": 0.1, "alpha": 0.5, "t0": 3.0, "weight_decay": 1e-2},
                {"maximize": True},
            ],
        ],
        training={"lr": 1e-2, "lambd": 1e-2, "t0": 20.0, "weight_decay": 1e-3},
    ),
    "lion": OptimizerCases(
        default={"lr": 1e-4},
        variants=[
            [
                {"lr": 1e-4, "betas": (0.8, 0.95), "weight_decay": 0.1},
                {"lr": 2e-4, "maximize": True},
            ],
        ],
        training={"lr": 1e-4, "weight_decay": 0.1},
        in_16_bits={"lr": 0.02},
    ),
}

SINGLE_GROUPS: list[tuple[str, Group]] = [
    (name, group)
    for name, cases in CASES.items()
    for group in (cases.default, *(groups[0] for groups in cases.variants))
]
"""Default and first group of each variant, for tests with one set of hyper-parameters."""

WITH_SCALARS: list[tuple[str, Group]] = [
    (name, CASES[name].variants[0][0])
    for name, kind in KINDS.items()
    if kind.scalars and name in CASES
]
"""First variant of each optimizer that keeps numbers once per tensor."""
