"""Lion (evolved sign momentum).

Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms",
https://arxiv.org/abs/2302.06675, Program 1.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from pscommon.optim.elementwise import ElementwiseOptimizer
from pscommon.optim.registry import find_out_of_range
from pscommon.optim.user_defined import add_formula


class Lion(ElementwiseOptimizer):
    """Steps by the sign of an interpolation between momentum and gradient.

    Its state is one number per weight. It works in plain PyTorch scripts and with
    `job.optimizer`, where the servers run it. Each step has the size `lr` in every element.
    Therefore the paper uses a learning rate 3 to 10 times smaller than that of AdamW, and a weight
    decay 3 to 10 times larger.

    Args:
        params: Parameters, or parameter groups, as for every torch optimizer.
        lr: Learning rate, the size of each element's step.
        betas: Weights of the momentum in the interpolation and in its own update, each in [0, 1).
        weight_decay: Decoupled weight decay.
        maximize: Step along the gradient instead of against it.

    Raises:
        ValueError: A value is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        hyper = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        if problem := find_out_of_range(hyper):
            raise ValueError(problem)
        super().__init__(params, hyper)


def _lion(
    weight: Tensor, gradient: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]
) -> None:
    momentum, (beta1, beta2) = state["exp_avg"], group["betas"]
    if group["maximize"]:
        gradient = -gradient
    if group["weight_decay"]:
        weight.mul_(1 - group["lr"] * group["weight_decay"])
    update = momentum.lerp(gradient, 1 - beta1).sign_()
    weight.add_(update, alpha=-group["lr"])
    momentum.lerp_(gradient, 1 - beta2)


add_formula(Lion, _lion, states=("exp_avg",))
