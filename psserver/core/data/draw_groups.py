"""Draw groups: batches that were dealt together to make one update (`--global-batch`).

A draw deals a fixed number of batches (units) to the workers: contiguous, in worker order, as
evenly as possible. Updates follow draws. A worker without a unit in a draw gets nothing of later
draws until some batch of that draw has counted. So each update is the mean over one draw,
independent of the order of requests, unless a worker is lost.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from pscommon.core.data_stream import Spec, StreamSpec
from pscommon.core.errors import InvalidRequestError
from psserver.core.data.batch_leases import BatchLeases


def shares(numbers: Sequence[int], parts: int) -> list[Sequence[int]]:
    """Split numbers into contiguous parts, as evenly as possible; the first parts get one more."""
    least, more = divmod(len(numbers), parts)
    ends = accumulate((least + (part < more) for part in range(parts)), initial=0)
    return [numbers[start:end] for start, end in pairwise(ends)]


def units_of(global_batch: int | None, spec: Spec) -> int | None:
    """Return the number of batches in an update; None: one batch of each worker.

    Raises:
        InvalidRequestError: --global-batch does not fit the loop.
    """
    if global_batch is None:
        return None
    if isinstance(spec, StreamSpec):
        raise InvalidRequestError(
            f"--global-batch {global_batch} cannot apply to a stream, whose length is not known. "
            "Try: start the servers without it"
        )
    if spec.batches:
        raise InvalidRequestError(
            f"--global-batch {global_batch} cannot apply to a batch_sampler, whose batches may "
            "differ in size. Try: sampler= with batch_size="
        )
    units, rest = divmod(global_batch, spec.batch_size)
    if rest or not units:
        raise InvalidRequestError(
            f"--global-batch {global_batch} is not a multiple of the script's batch_size "
            f"{spec.batch_size}: an update takes whole batches. Try: a batch_size that divides "
            "it, or another `--global-batch`"
        )
    return units


class DrawGroups:
    """Maps each leased batch to its draw.

    A draw is open until one of its batches has counted, or until none of them is leased.
    """

    def __init__(self) -> None:
        self._draw_of: dict[int, int] = {}
        self._next = 0
        self._counted = -1

    def add(self, numbers: Sequence[int]) -> None:
        """Record that these batches were dealt together."""
        self._draw_of.update(dict.fromkeys(numbers, self._next))
        self._next += 1

    def end(self, number: int, counts: bool) -> None:
        """Remove a batch that is no longer leased. counts: a push that used it counts."""
        draw = self._draw_of.pop(number, -1)
        if counts:
            self._counted = max(self._counted, draw)

    def may_have(self, leases: BatchLeases, worker: int, number: int | None = None) -> bool:
        """Return whether the worker leases a part of every open draw before that of `number`.

        None means before the next draw, so every open draw.
        """
        until = self._next if number is None else self._draw_of.get(number, 0)
        before = {draw for draw in self._draw_of.values() if self._counted < draw < until}
        return not before or before.issubset(
            self._draw_of.get(other) for other in leases.leased_by(worker)
        )

    def following(self, leases: BatchLeases, worker: int, number: int) -> int:
        """Return how many of the worker's batches belong to the same draw and follow this one."""
        leased, draw = leases.leased_by(worker), self._draw_of.get(number)
        after = leased[leased.index(number) + 1 :]
        return sum(draw is not None and self._draw_of.get(other) == draw for other in after)

    def state(self) -> dict[str, Any]:
        """Return the state, JSON-ready; `recovered` is the inverse."""
        return {
            "of": [list(pair) for pair in self._draw_of.items()],
            "next": self._next,
            "counted": self._counted,
        }

    @staticmethod
    def recovered(state: Mapping[str, Any]) -> "DrawGroups":
        draws = DrawGroups()
        draws._draw_of = dict(state["of"])
        draws._next, draws._counted = state["next"], state["counted"]
        return draws
