"""The state of an optimizer whose moments live on the servers."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from pscommon.core.errors import InvalidRequestError


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
