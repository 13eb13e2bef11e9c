"""The hyper-parameters of pushes, and which of them an update uses.

A push of a torch optimizer has those of all its parameter groups, as JSON. They count for that push
alone. A text changes with the schedule at most, so a server parses each one once.

A push of the framework-free client has none: its update uses those of the update before. Workers of
earlier releases sent only what had changed; their logs are replayed by the rule of then.
"""

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import NamedTuple

from pscommon.core.model_spec import OptimizerPart
from pscommon.optim.specs import Groups, groups_from_json, groups_of_push, groups_to_json

MAX_CACHED_TEXTS = 64
"""Parsed texts kept for each optimizer: workers at different steps of a schedule have a few."""


class PushGroups(NamedTuple):
    """The hyper-parameters of a push.

    values: those of each parameter group.
    text: the same as JSON.
    is_own: the push counts with these. False in logs of earlier releases: with these or with newer
        ones of other pushes.
    """

    values: Groups
    text: str
    is_own: bool = True


def parse_groups(parts: Mapping[str, OptimizerPart], text: str, name: str) -> PushGroups:
    """Return those of a received push of an optimizer.

    Raises InvalidRequestError if they do not fit.
    """
    values = groups_of_push(text, *parts[name])
    return PushGroups(values, groups_to_json(values))


def read_groups(
    parts: Mapping[str, OptimizerPart], text: str, name: str, is_own: bool
) -> PushGroups:
    """Return those of a logged push; they were checked before they were logged."""
    return PushGroups(groups_from_json(text, parts[name].settings), text, is_own)


def groups_of_update(pushes: Iterable[tuple[int, PushGroups | None]]) -> PushGroups | None:
    """Return the hyper-parameters of an update: those of the worker that joined first.

    Workers are numbered in the order in which they join. So a worker that joins late, with a
    schedule at its beginning, changes nothing for the others.

    Args:
        pushes: Worker and hyper-parameters of each push, in the order of the update.

    Returns:
        None if no push has any.
    """
    given = [(worker, groups) for worker, groups in pushes if groups is not None]
    if not given:
        return None
    is_own = all(groups.is_own for _, groups in given)
    return (min(given, key=itemgetter(0)) if is_own else given[0])[1]
