"""The data ledger of a loop over a map-style data set: batches are dealt in ascending order."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pscommon.core.data_loop import LoopSpec
from pscommon.core.data_stream import Spec
from psserver.core.data.batch_pool import BatchPool
from psserver.core.data.draw_groups import DrawGroups, shares
from psserver.core.data.loop import LoopLedger


class MapLoop(LoopLedger):
    """The data ledger of batches 0 to spec.total - 1."""

    spec: LoopSpec

    def __init__(
        self,
        spec: LoopSpec,
        has_left: Callable[[int, LoopLedger], bool] = lambda worker, loop: False,
    ) -> None:
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
