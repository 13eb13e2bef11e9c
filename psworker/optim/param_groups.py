"""The hyper-parameters of an optimizer's parameter groups, as they travel with a step."""

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch

from pscommon.core.errors import InvalidRequestError
from pscommon.optim.specs import groups_to_json, spec_of


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
    return (
        all(map(_is_constant, value))
        if type(value) is tuple
        else isinstance(value, (float, int, str, type(None)))
    )
