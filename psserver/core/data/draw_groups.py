"""Which batches were dealt together to make one update: `--global-batch`.

A draw deals a fixed number of batches (units) to the workers, in worker order, contiguous, as
even as can be. Updates follow draws: a worker with no unit in a draw sits out until something of
it has counted, and gets nothing of a later draw before. So each update is the mean over one
draw, whoever asks when, unless a worker is lost.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from pscommon.core.data_stream import Spec, StreamSpec
from pscommon.core.errors import InvalidRequestError
from psserver.core.data.batch_leases import BatchLeases


def shares(numbers: Sequence[int], parts: int) -> list[Sequence[int]]:
    """Contiguous, as even as can be: the first ones get one more."""
    least, more = divmod(len(numbers), parts)
    ends = accumulate((least + (part < more) for part in range(parts)), initial=0)
    return [numbers[start:end] for start, end in pairwise(ends)]


def units_of(global_batch: int | None, spec: Spec) -> int | None:
    """How many batches make an update; None: one of each worker."""
    if global_batch is None:
        return None
    if isinstance(spec, StreamSpec):
        raise InvalidRequestError(
            f"--global-batch {global_batch} needs data with a length: how much a stream holds, "
            f"and so what an "
            "update would take, is not known beforehand; start the servers without it"
        )
    if spec.batches:
        raise InvalidRequestError(
            f"--global-batch {global_batch} cannot apply to a batch_sampler, whose batches may "
            f"differ in size. "
            "Try: sampler= with batch_size="
        )
    units, rest = divmod(global_batch, spec.batch_size)
    if rest or not units:
        raise InvalidRequestError(
            f"--global-batch {global_batch} is not a multiple of the script's batch_size "
            f"{spec.batch_size}: "
            "an update takes whole batches, so choose a batch_size that divides it, or another "
            "--global-batch"
        )
    return units


class DrawGroups:
    """The draw of each leased batch. A draw is open until something of it has counted, or nobody
    holds any of it.
    """

    def __init__(self) -> None:
        self._draw_of: dict[int, int] = {}
        self._next = 0
        self._counted = -1

    def add(self, numbers: Sequence[int]) -> None:
        """These were dealt together."""
        self._draw_of.update(dict.fromkeys(numbers, self._next))
        self._next += 1

    def end(self, number: int, counts: bool) -> None:
        """Nobody holds the batch any more. counts: because a push that used it does."""
        draw = self._draw_of.pop(number, -1)
        if counts:
            self._counted = max(self._counted, draw)

    def may_have(self, leases: BatchLeases, worker: int, number: int | None = None) -> bool:
        """Has this worker its part of every open draw before the one of `number` (None: of all
        open ones)?
        """
        until = self._next if number is None else self._draw_of.get(number, 0)
        before = {draw for draw in self._draw_of.values() if self._counted < draw < until}
        return not before or before.issubset(
            self._draw_of.get(held) for held in leases.held(worker)
        )

    def following(self, leases: BatchLeases, worker: int, number: int) -> int:
        """How many of the worker's batches belong to the same draw and come after this one."""
        held, draw = leases.held(worker), self._draw_of.get(number)
        after = held[held.index(number) + 1 :]
        return sum(draw is not None and self._draw_of.get(other) == draw for other in after)

    def state(self) -> dict[str, Any]:
        """JSON-ready; `recovered` is the way back."""
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
