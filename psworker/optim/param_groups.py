"""The hyper-parameters of an optimizer's parameter groups, as they travel with a step."""

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch

from pscommon.core.errors import InvalidRequestError
from pscommon.optim.specs import groups_to_json, spec_of


class GroupSettings:
    """An optimizer's hyper-parameters as JSON, made anew only where they may have changed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._members = [list(group["params"]) for group in optimizer.param_groups]
        self._seen: list[dict[str, Any]] | None = None
        self._text = ""

    def groups_json(self, groups: list[dict[str, Any]]) -> str:
        """Of the parameter groups as they stand now. groups: those that the script sees."""
        self._check_members(groups)
        known = self._optimizer.defaults.keys()  # what else stands in a group is the script's own
        seen = [
            {key: group[key] for key in known & group.keys()}
            for group in self._optimizer.param_groups
        ]
        if seen != self._seen or not all(
            _is_constant(value) for group in seen for value in group.values()
        ):
            self._seen, self._text = seen, groups_to_json(spec_of(self._optimizer).groups)
        return self._text

    def _check_members(self, groups: list[dict[str, Any]]) -> None:
        """The servers know from the start which weights belong to which group, and look at no
        other groups.
        """
        shared = groups is self._optimizer.param_groups and len(groups) == len(self._members)
        if not shared or not all(
            _are(group["params"], own) for group, own in zip(groups, self._members, strict=True)
        ):
            raise InvalidRequestError(
                "the optimizer's parameter groups are not those that the job was made with, and "
                "which weights train in which group is fixed: change a group's values where they "
                "stand (group['lr'] = ...), and switch requires_grad, or set gradients to None, to "
                "leave weights out"
            )


def _are(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _is_constant(value: Any) -> bool:
    """A tensor or a list may have changed without being another one."""
    return (
        all(map(_is_constant, value))
        if type(value) is tuple
        else isinstance(value, (float, int, str, type(None)))
    )
