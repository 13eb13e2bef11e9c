"""The data ledger of a loop over a map-style data set: batches are dealt in ascending order.

With `--global-batch` a draw deals a fixed number of batches (units) to the workers: contiguous, in
worker order, as evenly as possible. Updates follow draws. A worker without a unit in a draw gets
nothing of later draws until some batch of that draw has counted. So each update is the mean over
one draw, independent of the order of requests, unless a worker is lost.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from pscommon.core.data_loop import LoopSpec
from pscommon.core.data_stream import Spec, StreamSpec
from pscommon.core.errors import InvalidRequestError
from psserver.core.data.batch_leases import BatchLeases, BatchPool
from psserver.core.data.loop import HasLeft, LoopLedger, never_left


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


class MapLoop(LoopLedger):
    """The data ledger of batches 0 to spec.total - 1."""

    spec: LoopSpec

    def __init__(self, spec: LoopSpec, has_left: HasLeft = never_left) -> None:
        super().__init__(spec, has_left)
        self._pool = BatchPool(spec.total)
        self._draws = DrawGroups()

    @property
    def committed(self) -> int:
        return self._pool.committed

    @property
    def free(self) -> int:
        """Batches that are neither leased nor committed."""
        return self.spec.total - self.committed - len(self.leases)

    @property
    def done(self) -> bool:
        return self.committed == self.spec.total

    def extend(self, spec: Spec) -> None:
        super().extend(spec)
        self._pool.total = self.spec.total

    def has_dealt(self, worker: int) -> bool:
        ready = self.leases.ready(worker)
        return bool(ready) and self._draws.may_have(self.leases, worker, ready[0])

    def following(self, worker: int, numbers: Iterable[int]) -> list[int]:
        if self.units is None:
            return []
        return [self._draws.following(self.leases, worker, number) for number in numbers]

    def _may_draw(self, worker: int) -> bool:
        return self._pool.peek() is not None and self._draws.may_have(self.leases, worker)

    def _draw(self, workers: Sequence[int]) -> bool:
        if self.units is None:
            parts: list[Sequence[int]] = [[number] for number in self._drawn(len(workers))]
        else:
            parts = shares(self._drawn(self.units), len(workers))
            self._draws.add([number for part in parts for number in part])
        for worker, part in zip(workers, parts, strict=False):
            for number in part:
                self.leases.deal(worker, number)
        return any(parts)

    def _drawn(self, count: int) -> list[int]:
        """Return the next batches; with --global-batch all of one epoch."""
        numbers: list[int] = []
        while len(numbers) < count and (number := self._pool.peek()) is not None:
            if (
                numbers
                and self.units is not None
                and self.spec.epoch(number) != self.spec.epoch(numbers[0])
            ):
                break
            numbers.append(self._pool.take())
        return numbers

    def _count(self, number: int) -> None:
        self._draws.end(number, counts=True)
        self._pool.commit(number)

    def _free(self, number: int) -> None:
        self._draws.end(number, counts=False)
        self._pool.put_back(number)

    def state(self) -> dict[str, Any]:
        return super().state() | self._pool.state() | {"draws": self._draws.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._pool = BatchPool.restored(self.spec.total, state)

    def recover(self, state: Mapping[str, Any]) -> None:
        super().recover(state)
        self._pool = BatchPool.recovered(self.spec.total, state)
        self._draws = DrawGroups.recovered(state["draws"])
