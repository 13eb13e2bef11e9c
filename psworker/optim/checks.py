"""Checks of what a script gives to its job's optimizer."""

from contextlib import suppress
from operator import index
from typing import Any, Never

import torch

from pscommon.core.errors import InvalidRequestError


def checked_weight(samples: Any) -> int:
    """Return the argument `samples` of a step as int; InvalidRequestError if it is no weight."""
    with suppress(TypeError):
        if not isinstance(samples, bool) and (weight := index(samples)) > 0:
            return weight
    raise InvalidRequestError(
        f"samples={samples!r}: the weight of a gradient is a whole number of samples, at least 1. "
        "Try: to leave a gradient out, do not call step()"
    )


def check_own_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise InvalidRequestError if the script has replaced the optimizer's step.

    LR schedulers replace it by a function that counts the steps and changes nothing.
    """
    if "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise InvalidRequestError(
            "this optimizer's step() was replaced, but the servers run torch's own. Try: put code "
            "before or after a step into register_step_pre_hook and register_step_post_hook"
        )


def refuse_copy(*_: Any) -> Never:
    """Raise InvalidRequestError: a copy of a job's optimizer has no job."""
    raise InvalidRequestError(
        "this is a copy of a job's optimizer: it has the settings, but no job. Try: call step() of "
        "the optimizer that job.optimizer(...) returned"
    )
