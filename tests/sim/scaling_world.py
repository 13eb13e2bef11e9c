"""A simulated job whose number of workers follows WorkerScaling: speed curves, noise, stragglers,
losses, and a launcher that needs its time.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from psserver.core.job.worker_scaling import Decision, Observation, WorkerScaling

TICK_SECONDS, START_SECONDS, WARM_SECONDS = 0.5, 12.0, 6.0
BATCH = 32
SMALLEST, LARGEST = 1, 8
HOUR_SECONDS = 3600.0

Curve = Callable[[int], float]
"""Seconds of an update by the number of workers, relative to that of one worker."""

CURVES: dict[str, Curve] = {
    "linear": lambda n: 1.0,
    "saturated by four workers": lambda n: max(1.0, n / 4),
    "saturated by six workers": lambda n: max(1.0, n / 6),
    "slower with more than three workers": lambda n: 1.0 if n <= 3 else n / 2.5,
    "no gain at all": lambda n: float(n),
    "diminishing": lambda n: 1 + 0.2 * (n - 1),
}


def gain(curve: Curve, n: int) -> float:
    """Return the gain of the n-th worker, see worker_scaling."""
    before = (n - 1) / curve(n - 1)
    return (n / curve(n) - before) / (before / (n - 1))


def acceptable(curve: Curve) -> range:
    """Return the numbers of workers at which the policy may stay."""
    least = SMALLEST
    while least < LARGEST and gain(curve, least + 1) >= 0.6:
        least += 1
    largest = least
    while largest < LARGEST and gain(curve, largest + 1) >= 0.15:
        largest += 1
    return range(least, largest + 1)


@dataclass
class World:
    """A job under sync.

    Attributes:
        capacity: Number of workers that the launcher has machines for.
        noise: Standard deviation of the logarithm of an update's time.
        slow: How much longer than the others each of these workers needs.
    """

    scaling: WorkerScaling
    curve: Curve
    seed: int
    workers: int
    noise: float = 0.0
    capacity: int = LARGEST
    slow: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.now = self.samples = self.pushes = 0
        self.now = 0.0
        self.wanted, self.newest = self.workers, self.workers
        self.joined: dict[int, float] = dict.fromkeys(range(1, self.workers + 1), -WARM_SECONDS)
        self.coming: list[float] = []
        self.decisions: list[tuple[float, Decision]] = []
        self.update_at = 1.0

    def run(self, seconds: float) -> "World":
        end = self.now + seconds
        while self.now < end:
            self.now += TICK_SECONDS
            self._train()
            self._launch()
            self._ask()
        return self

    def lose(self, worker: int) -> None:
        """Let a worker die; the launcher starts another one if it can."""
        del self.joined[worker]

    def decided_after(self, since: float) -> Sequence[Decision]:
        return [decision for at, decision in self.decisions if at > since]

    def _train(self) -> None:
        while self.update_at <= self.now and self.joined:
            count = len(self.joined)
            self.samples += BATCH * count
            self.pushes += count
            slowest = max(self.slow.get(worker, 1.0) for worker in self.joined)
            is_warm = all(self.now - at >= WARM_SECONDS for at in self.joined.values())
            seconds = self.curve(count) * slowest * (1.0 if is_warm else 3.0)
            self.update_at += seconds * math.exp(self.rng.gauss(0.0, self.noise))
        self.update_at = max(self.update_at, self.now - 10.0)

    def _launch(self) -> None:
        while self.coming and self.coming[0] <= self.now:
            self.coming.pop(0)
            self.newest += 1
            self.joined[self.newest] = self.now
        missing = min(self.wanted, self.capacity) - len(self.joined) - len(self.coming)
        self.coming += [self.now + START_SECONDS] * missing
        for worker in sorted(self.joined)[self.wanted :]:
            del self.joined[worker]

    def _ask(self) -> None:
        paces = {
            worker: self.slow.get(worker, 1.0 + worker % 3 / 10)
            * math.exp(self.rng.gauss(0.0, self.noise))
            for worker in self.joined
        }
        seen = Observation(self.wanted, paces, self.samples, self.pushes)
        if (decision := self.scaling.observe(seen, self.now)) is None:
            return
        in_bounds = SMALLEST <= self.wanted <= LARGEST
        assert SMALLEST <= decision.wanted <= LARGEST, decision
        assert decision.reason, decision
        assert not in_bounds or abs(decision.wanted - self.wanted) == 1, decision
        if decision.straggler is not None:
            assert self.slow.get(decision.straggler, 1.0) > 1.5, f"not slow: {decision}"
            del self.joined[decision.straggler]  # the coordinator drains it
        self.decisions.append((self.now, decision))
        self.wanted = decision.wanted
