"""Collective calls of a script: barriers, means and broadcasts of small values."""

import json
import math
from collections.abc import Mapping
from typing import Any, SupportsFloat

from pscommon.core.errors import InvalidRequestError
from pscommon.core.limits import (
    MAX_BROADCAST_NBYTES,
    MAX_COLLECTIVE_VALUES,
    MAX_SAMPLES_PER_PUSH,
)
from psworker.core.results import CollectiveCall, CollectiveResult
from psworker.session.arguments import check_integer
from psworker.session.session import Session


class ScriptCollectives:
    """Numbers the collective calls of a script, and makes them.

    The numbers begin again with each outermost training pass, so a script that skips a finished
    pass meets the later calls of the others.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._count = self._passes = 0

    def barrier(self) -> None:
        """See Job.barrier."""
        self._make(CollectiveCall("barrier"))

    def all_reduce(self, values: Mapping[str, SupportsFloat], samples: int) -> dict[str, float]:
        """See Job.all_reduce."""
        if not isinstance(values, Mapping) or not 0 < len(values) <= MAX_COLLECTIVE_VALUES:
            raise InvalidRequestError(
                f"job.all_reduce takes a mapping of 1 to {MAX_COLLECTIVE_VALUES} names to numbers. "
                'Try: job.all_reduce({"loss": loss})'
            )
        numbers = {str(name): _number(name, values[name]) for name in sorted(values)}
        weight = check_integer("samples", samples, 0, MAX_SAMPLES_PER_PUSH)
        return dict(self._make(CollectiveCall("all_reduce", numbers, weight)).values)

    def broadcast(self, value: Any) -> Any:
        """See Job.broadcast."""
        try:
            text = json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"job.broadcast takes a JSON value: {error}. Try: numbers, strings, lists and "
                "dicts; tensors as value.tolist()"
            ) from error
        if (nbytes := len(text.encode())) > MAX_BROADCAST_NBYTES:
            raise InvalidRequestError(
                f"job.broadcast: the value has {nbytes} bytes of JSON, above "
                f"{MAX_BROADCAST_NBYTES}. Try: a file that all workers can read"
            )
        return json.loads(self._make(CollectiveCall("broadcast", text=text)).text)

    def _make(self, call: CollectiveCall) -> CollectiveResult:
        session = self._session
        session.check_stopping()
        if self._passes != session.loops.training_passes:
            self._count, self._passes = 0, session.loops.training_passes
        self._count += 1
        number, before = self._count, session.enter("wait")
        try:
            result = session.with_rejoin(
                lambda: session.client.collective(number, call, session.loops.place())
            )
        finally:
            session.enter(before)
        if session.model is not None and result.version > session.version:
            session.refresh(keeps_weights=True)  # rounds went on while this worker waited
        return result


def _number(name: str, value: SupportsFloat) -> float:
    if (size := math.prod(getattr(value, "shape", ()))) != 1:
        raise InvalidRequestError(
            f"job.all_reduce: {name!r} has {size} elements. Try: one number, such as "
            f"{name}.mean(); tensors travel with optimizer.step()"
        )
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"job.all_reduce: {name!r} is {value!r}, not a number. Try: a float"
        ) from error
