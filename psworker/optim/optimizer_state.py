"""The state of an optimizer whose moments live on the servers."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from pscommon.core.errors import InvalidRequestError
from pscommon.optim import KINDS
from pscommon.optim.specs import spec_of

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
        state_dict: The state_dict.
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
