"""Progress of the current pass over the data, and the remaining time."""

from collections import deque
from typing import Any

from pscommon.core.data_loop import LoopSpec
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.data.loop import LoopLedger

WINDOW_SECONDS = 30.0
SAMPLE_SECONDS = 0.5


class PassProgress:
    """The current pass belongs to the loop whose batches counted last; a loop for evaluation
    counts none.

    The caller guarantees that the coordinator does not change.
    """

    def __init__(self) -> None:
        self._coordinator: CoordinatorMachine | None = None
        self._loop: LoopLedger | None = None
        self._counted: dict[int, int] = {}
        self._samples: deque[tuple[float, int]] = deque()

    def update(self, coordinator: CoordinatorMachine, now: float) -> None:
        """Record what has counted. Called several times a second."""
        if coordinator is not self._coordinator:  # the job went back to a snapshot
            self._coordinator, self._loop, self._counted = coordinator, None, {}
            self._samples.clear()
        known = self._counted
        self._counted = {number: _counted(loop) for number, loop in coordinator.ledger.live.items()}
        grown = [
            number for number, counted in self._counted.items() if counted > known.get(number, 0)
        ]
        if grown and (self._loop is None or self._loop.spec.loop not in grown):
            self._loop = coordinator.ledger.loops[grown[-1]]
            self._samples.clear()
        if self._loop is not None and (
            not self._samples or now - self._samples[-1][0] >= SAMPLE_SECONDS
        ):
            self._samples.append((now, _counted(self._loop)))
            while now - self._samples[0][0] > WINDOW_SECONDS:
                self._samples.popleft()

    def describe(self, coordinator: CoordinatorMachine, now: float) -> dict[str, Any]:
        """Return the key `progress` of the status:

        loop: number of the loop
        pass, passes: which pass of how many, from 1 (passes: null for one pass per loop)
        percent, remaining_seconds: of the pass; null for a stream and while nothing counts
        samples_per_second: of all workers
        loss: the last reported value of this name
        """
        _, loss = coordinator.reported.latest.get("loss", (0, None))
        common = {"samples_per_second": samples_per_second(coordinator), "loss": loss}
        absent = dict.fromkeys(("loop", "pass", "passes", "percent", "remaining_seconds"))
        loop = self._loop if coordinator is self._coordinator else None
        if loop is None:
            return {**absent, **common}
        if not isinstance(loop.spec, LoopSpec) or not loop.spec.total:
            return {**absent, "loop": loop.spec.loop, **common}
        spec, committed = loop.spec, loop.committed
        length = spec.batches_in_epoch
        is_done = committed >= spec.total
        done = length if is_done else committed % length
        index = spec.epochs - 1 if is_done else committed // length
        return {
            "loop": spec.loop,
            "pass": spec.first_epoch + index + 1,
            "passes": spec.first_epoch + spec.epochs if spec.epochs > 1 else None,
            "percent": round(100.0 * done / length, 1),
            "remaining_seconds": self._remaining(0 if loop.ended else length - done, now),
            **common,
        }

    def _remaining(self, batches: int, now: float) -> float | None:
        if not batches:
            return 0.0
        if not self._samples or self._loop is None:
            return None
        since, before = self._samples[0]
        seconds, counted = now - since, _counted(self._loop) - before
        return round(batches * seconds / counted, 1) if counted > 0 and seconds > 0 else None


def samples_per_second(coordinator: CoordinatorMachine) -> float:
    """Return the sum over the workers of what their heartbeats report."""
    members = coordinator.membership.registered()
    return sum(member.heartbeat.samples_per_second for member in members)


def _counted(loop: LoopLedger) -> int:
    """Return the number of batches that counted, without dropped ones."""
    return loop.committed - loop.dropped
