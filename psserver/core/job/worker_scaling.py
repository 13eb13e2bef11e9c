"""How many workers a job wants, decided from its measured speed (`--scale-workers`).

Theory of operation. The method is that of A. Or, H. Zhang and M. Freedman, "Resource Elasticity in
Distributed Deep Learning" (MLSys 2020): add workers while the throughput that one more brings is
worth it, and remove persistent stragglers with the same mechanism.

The gain of the n-th worker is (T(n) - T(n - 1)) / (T(n - 1) / (n - 1)), where T is the number of
counted samples a second: 1 if it brings as much as the ones before it, 0 if it brings nothing.

States: settling (the workers are not the wanted number yet, or just became it), measuring.
Events: an observation, a few times a second.

- A measurement consists of windows of at least WINDOW_SECONDS, in which each worker pushed
  PUSHES_OF_EACH_WORKER_COUNT times. It is complete once its standard error is at most
  MAX_NOISE_RATIO of what one worker brings, or after MAX_WINDOWS.
- A worker that was slower than STRAGGLER_FACTOR times the median of the others in all windows
  leaves. No worker is added in its place until the gains are forgotten.
- A worker is added while the gain of the last one is at least ADDING_GAIN_RATIO or not known.
- The last worker leaves if its gain is less than STAYING_GAIN_RATIO. Where the gain is not known,
  one worker leaves for a measurement, and returns unless the gain is that small.

Invariants:

- Hysteresis: between the two limits the number stays. A gain is measured once and counts for
  GAIN_SECONDS, so a number that was not worth it is not tried again before.
- The number stays within its bounds. It changes by one, and only after a measurement, except for
  the bounds themselves and for workers that do not come or go within FOLLOW_SECONDS.
- Nothing here is saved: decisions are commands. A new process measures again.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from psserver.core.workers.members import median

WINDOW_SECONDS, PUSHES_OF_EACH_WORKER_COUNT = 3.0, 3
MIN_WINDOWS, MAX_WINDOWS = 16, 240
MAX_NOISE_RATIO = 0.05

SETTLE_SECONDS = 10.0
"""Time after a change of the workers that counts for no measurement: caches and links warm up."""

ADDING_GAIN_RATIO, STAYING_GAIN_RATIO = 0.5, 0.25
STRAGGLER_FACTOR = 2.0
GAIN_SECONDS = 3600.0

FOLLOW_SECONDS = 180.0
"""Time for whatever places workers to follow; then the workers that are there are the wanted ones.
"""


class Observation(NamedTuple):
    """The job at one moment.

    Attributes:
        wanted: Number of workers that the job wants.
        paces: Seconds that each worker needs for its own part of a step, by worker; None: not
            known. Workers that were asked to leave are not among them.
        samples: Counted samples of the job.
        pushes: Counted pushes of the job.
    """

    wanted: int
    paces: Mapping[int, float | None]
    samples: int
    pushes: int


class Decision(NamedTuple):
    """Another number of workers.

    Attributes:
        straggler: The worker that is to leave; None: the launcher chooses.
    """

    wanted: int
    reason: str
    straggler: int | None = None


class Gain(NamedTuple):
    """The gain of a worker, as in the module's text, and when it is forgotten."""

    value: float
    until: float


class Throughput(NamedTuple):
    """A measurement: samples a second with this number of workers."""

    workers: int
    rate: float


class WorkerScaling:
    """The policy; see the module's text.

    Args:
        smallest: Smallest number of workers.
        largest: Largest number of workers.
    """

    def __init__(self, smallest: int, largest: int) -> None:
        self._smallest, self._largest = smallest, largest
        self._gains: dict[int, Gain] = {}  # by the number of workers with the last one
        self._before: Throughput | None = None  # with one worker more or less
        self._known: tuple[frozenset[int], int] = frozenset(), 0  # workers, and the wanted number
        self._since = 0.0  # when one of them last changed
        self._restart()

    def _restart(self) -> None:
        """Begin a measurement."""
        self._start: tuple[float, int, int] | None = None  # of a window: time, samples, pushes
        self._last_samples = -1
        self._rates: list[float] = []
        self._slow: dict[int, int] = {}  # windows in which a worker was slow

    def observe(self, seen: Observation, now: float) -> Decision | None:
        """Take an observation; return a decision or None.

        Args:
            seen: The job now.
            now: The time in seconds of any clock that goes forward.
        """
        known = frozenset(seen.paces), seen.wanted
        if known != self._known:
            self._known, self._since = known, now
            self._restart()
        bounded = min(max(seen.wanted, self._smallest), self._largest)
        if bounded != seen.wanted:
            return Decision(bounded, f"the bounds are {self._smallest} and {self._largest}")
        if len(seen.paces) != seen.wanted:
            return self._follow(seen, now)
        if now - self._since < SETTLE_SECONDS or not self._measure(seen, now):
            return None
        measured, slow = Throughput(seen.wanted, middle(self._rates)[0]), self._straggler()
        self._restart()
        return self._choose(measured, slow, now)

    def _follow(self, seen: Observation, now: float) -> Decision | None:
        """Want the workers that are there if those that were wanted do not come, or do not go."""
        present = min(max(len(seen.paces), self._smallest), self._largest)
        if now - self._since < FOLLOW_SECONDS or not seen.paces or present == seen.wanted:
            return None
        if present < seen.wanted:  # more would not come either
            self._gains[present + 1] = Gain(0.0, now + GAIN_SECONDS)
        return Decision(present, f"{len(seen.paces)} workers are there")

    def _measure(self, seen: Observation, now: float) -> bool:
        """Take part of a measurement; return whether it is complete.

        A window begins and ends when samples count: an update has the samples of many steps.
        """
        is_news, self._last_samples = seen.samples != self._last_samples, seen.samples
        if not is_news:
            return False
        if self._start is None or seen.samples < self._start[1]:  # a rollback
            self._start = now, seen.samples, seen.pushes
            return False
        began, samples, pushes = self._start
        enough = PUSHES_OF_EACH_WORKER_COUNT * len(seen.paces)
        if now - began < WINDOW_SECONDS or seen.pushes - pushes < enough:
            return False
        self._start = now, seen.samples, seen.pushes
        self._rates.append((seen.samples - samples) / (now - began))
        for worker in stragglers(seen.paces):
            self._slow[worker] = self._slow.get(worker, 0) + 1
        if len(self._rates) < MIN_WINDOWS:
            return False
        rate, error = middle(self._rates)
        return len(self._rates) >= MAX_WINDOWS or len(seen.paces) * error <= MAX_NOISE_RATIO * rate

    def _straggler(self) -> int | None:
        slow = (worker for worker, count in self._slow.items() if count == len(self._rates))
        return next(slow, None)

    def _choose(self, measured: Throughput, slow: int | None, now: float) -> Decision | None:
        wanted, before, self._before = measured.workers, self._before, None
        self._gains = {n: gain for n, gain in self._gains.items() if gain.until > now}
        if slow is not None and wanted > self._smallest:
            self._gains = {
                n: Gain(float(n < wanted), now + GAIN_SECONDS) for n in (wanted - 1, wanted)
            }
            reason = f"worker {slow} needs over {STRAGGLER_FACTOR:g} times as long as the others"
            return Decision(wanted - 1, reason, slow)
        is_trial = False
        if before is not None and abs(before.workers - wanted) == 1:
            smaller, larger = sorted((before, measured))
            is_trial = larger is before and larger.workers not in self._gains
            gain = Gain(gain_of(smaller, larger), now + GAIN_SECONDS)
            self._gains.setdefault(larger.workers, gain)
        decision = self._by_gain(wanted, is_trial)
        if decision is not None:
            self._before = measured
        return decision

    def _by_gain(self, wanted: int, is_trial: bool) -> Decision | None:
        """Decide. is_trial: One worker has left to measure its gain."""
        last, further = (
            gain.value if (gain := self._gains.get(number)) is not None else None
            for number in (wanted, wanted + 1)
        )
        if wanted > self._smallest and last is not None and last < STAYING_GAIN_RATIO:
            return Decision(wanted - 1, f"the last worker adds {last:.0%} of one before it")
        is_worth = last is None or last >= ADDING_GAIN_RATIO
        if wanted < self._largest and further is None and is_worth:
            known = "is not known" if last is None else f"is {last:.0%}"
            return Decision(wanted + 1, f"the gain of the last worker {known}")
        limit = STAYING_GAIN_RATIO if is_trial else ADDING_GAIN_RATIO
        if wanted < self._largest and further is not None and further >= limit:
            return Decision(wanted + 1, f"one more worker adds {further:.0%} of one before it")
        if wanted > self._smallest and last is None:
            return Decision(wanted - 1, "the gain of the last worker is not known")
        return None


def stragglers(paces: Mapping[int, float | None]) -> list[int]:
    """Return the workers that need more than STRAGGLER_FACTOR times the median of the others."""
    known = {worker: seconds for worker, seconds in paces.items() if seconds is not None}
    found = []
    for worker, seconds in known.items():
        others = [pace for other, pace in known.items() if other != worker]
        if others and seconds > STRAGGLER_FACTOR * median(others):
            found.append(worker)
    return sorted(found, key=lambda worker: -(known[worker]))


def middle(rates: Sequence[float]) -> tuple[float, float]:
    """Return the mean of the middle half of the rates, and its standard error.

    A median would be biased: an observation sees an update a moment late. The other half may have
    an evaluation or a snapshot in it.
    """
    ordered, cut = sorted(rates), len(rates) // 4
    low, high = ordered[cut], ordered[-cut - 1]
    half = ordered[cut : len(ordered) - cut]
    mean = sum(half) / len(half)
    deviations = [min(max(rate, low), high) - mean for rate in ordered]  # winsorized
    variance = sum(each * each for each in deviations) / (len(ordered) - 1)
    return mean, (variance / len(ordered)) ** 0.5 * len(ordered) / len(half)


def gain_of(smaller: Throughput, larger: Throughput) -> float:
    """Return the gain of the last worker of the larger number."""
    of_one = smaller.rate / smaller.workers
    return (larger.rate - smaller.rate) / of_one if of_one > 0 else 0.0
