"""What a job takes from a script's torch optimizer: its groups, its state_dict, its step."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import index, is_
from typing import Any, Never

import torch

from pscommon.core.errors import InvalidRequestError
from pscommon.optim import KINDS
from pscommon.optim.specs import groups_to_json, spec_of

STATE_DICT_KEY = "paramserver"
"""Key of a job's entry in the state_dict of its optimizer."""


class StateOnServers(defaultdict[Any, Any]):
    """The empty `state` of a `ServerOptimizer`.

    It is never false: where `state` is false, torch.distributed.checkpoint creates one by a step
    with gradients of zero, which the servers would count.
    """

    def __init__(self) -> None:
        super().__init__(dict)

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


def check_unused(state: Mapping[Any, Any]) -> None:
    """Raise InvalidRequestError if an optimizer with this state has made steps.

    Adagrad has state before its first step. A step, or a moment without a step count, is history.
    """
    for entries in state.values():
        given = {key: value for key, value in entries.items() if value is not None}
        if given and float(given.get("step", 1)) != 0:
            raise InvalidRequestError(
                "this optimizer has made steps, and its state cannot be brought to the servers. "
                "Try: a fresh torch optimizer; the servers resume their own snapshot (`--resume`)"
            )


def check_same_job(
    state_dict: Mapping[str, Any],
    here: Mapping[str, str],
    is_new: bool,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Raise InvalidRequestError if a state_dict is of another job or training.

    Its moments are on that job's servers, and would be lost. An optimizer without state has none.

    Args:
        here: Names of this job and training, by key of the state_dict's entry.
        is_new: This training has made no update.
        optimizer: The torch optimizer that loads it.
    """
    origin = state_dict.get(STATE_DICT_KEY, {})
    # an entry of an earlier release names no training
    is_same = all(origin.get(key, name) == name for key, name in here.items())
    if not origin.get("version") or (is_same and not is_new):
        return
    settings = spec_of(optimizer)
    kind = KINDS[settings.name]
    groups = [
        {**mine, **loaded}
        for mine, loaded in zip(settings.groups, state_dict["param_groups"], strict=False)
    ]
    if kind.counts_steps or any(kind.states_of(group) for group in groups):
        raise InvalidRequestError(
            f"this state_dict has no moments: they are on the servers of job {origin.get('job')} "
            f"at version {origin['version']}. Try: resume that job (`--data-dir`); or, to drop "
            f"them, remove the key {STATE_DICT_KEY!r}"
        )


class GroupSettings:
    """An optimizer's hyper-parameters as JSON, encoded again only if they may have changed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._members = [list(group["params"]) for group in optimizer.param_groups]
        self._encoded: list[dict[str, Any]] | None = None
        self._text = ""

    def groups_json(self, groups: list[dict[str, Any]]) -> str:
        """Return the hyper-parameters of all groups. groups: The groups that the script sees."""
        self._check_members(groups)
        known = self._optimizer.defaults.keys()  # other keys of a group belong to the script
        values = [
            {key: group[key] for key in known & group.keys()}
            for group in self._optimizer.param_groups
        ]
        if values != self._encoded or not all(
            _is_constant(value) for group in values for value in group.values()
        ):
            self._encoded, self._text = values, groups_to_json(spec_of(self._optimizer).groups)
        return self._text

    def _check_members(self, groups: list[dict[str, Any]]) -> None:
        """Raise InvalidRequestError if a group has other parameters than at the start."""
        shared = groups is self._optimizer.param_groups and len(groups) == len(self._members)
        if not shared or not all(
            _are_same(group["params"], own)
            for group, own in zip(groups, self._members, strict=True)
        ):
            raise InvalidRequestError(
                "the parameters of a group are fixed, but a group has others now. Try: change "
                "values in place (group['lr'] = ...), and leave weights out by requires_grad"
            )


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _is_constant(value: Any) -> bool:
    """Return False for a tensor or a list: it may have changed in place."""
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return isinstance(value, (float, int, str, type(None)))


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
