"""The spans of a trace by push and by time, one class for each kind of process."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from pscommon.tracing.spans import Span

SCRIPT_SPANS = ("data", "compute", "gather", "scatter")
BUCKET_SECONDS = 0.02
MAX_BUCKETED_SECONDS = 1.0
TOLERANCE_SECONDS = 20e-6
"""Durations are numbers of 32 bits, and threads take turns."""

Push = tuple[int, int]


class Who(NamedTuple):
    """What a part of a wait is spent in.

    Attributes:
        kind: "worker", "shard", "link" (of a worker and a shard), "shard link" (of a shard and
            shard 0), "coordinator", or empty: it is not known.
        worker: Number of the worker, of a worker or a link.
        shard: Number of the shard, of a shard or a link.
    """

    kind: str = ""
    worker: int = 0
    shard: int = 0


COORDINATOR = Who("coordinator")
UNKNOWN = Who()


class WaitPart(NamedTuple):
    """Seconds of a wait, and what they are spent in."""

    seconds: float
    phase: str
    who: Who


class WorkerSpans:
    """The spans of a worker, by push."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.script: dict[int, list[Span]] = defaultdict(list)
        self.sent: dict[tuple[int, int], Span] = {}
        """By push and shard: the first one."""
        self.received: dict[tuple[int, int], Span] = {}
        """By push and shard: the last one."""
        self.exchange: dict[int, list[Span]] = defaultdict(list)
        """Send and receive, by push."""
        self._leases: dict[int, list[Span]] = defaultdict(list)
        for span in sorted(spans, key=lambda each: each.began):
            if not span.pushes:
                continue
            push = span.pushes[0][1]
            if span.name in SCRIPT_SPANS:
                self.script[push].append(span)
            elif span.name == "lease":
                self._leases[push].append(span)
            elif span.name == "send":
                self.sent.setdefault((push, span.shard), span)
                self.exchange[push].append(span)
            elif span.name == "receive":
                self.received[push, span.shard] = span
                self.exchange[push].append(span)
        self._arrivals = sorted((span.ended, *key) for key, span in self.received.items())
        self._last_answers = {push: (push, shard) for _, push, shard in self._arrivals}
        self._before = dict(zip(list(self.script)[1:], self.script, strict=False))

    def last_answer(self, began: float, ended: float) -> tuple[float, int, int] | None:
        """Return end, push and shard of the last answer that ends in this time."""
        index = bisect_right(self._arrivals, (ended + TOLERANCE_SECONDS,)) - 1
        found = self._arrivals[index] if index >= 0 else None
        return found if found is not None and found[0] >= began else None

    def seconds(self, push: int, phase: str) -> float:
        """Return the sum of a phase of the script in the step of a push."""
        return sum(span.seconds for span in self.script.get(push, ()) if span.name == phase)

    def leases(self, push: int) -> list[Span]:
        """Return the script's requests for batches; those of another thread run beside it."""
        script = self.script.get(push, ())
        return [span for span in self._leases[push] if script and span.thread == script[0].thread]

    def beside(self, push: int, name: str, span: Span) -> list[tuple[float, float]]:
        """Return when `send` or `receive` of a push, or of the one before, run beside a span."""
        spans = [*self.exchange.get(push, ()), *self.exchange.get(self._before.get(push, -1), ())]
        times = [
            (max(s.began, span.began), min(s.ended, span.ended)) for s in spans if s.name == name
        ]
        return [(start, stop) for start, stop in times if stop > start]

    def answer_before(self, push: int) -> tuple[int, int] | None:
        """Return the push of the step before, and the shard that answered it last."""
        before = self._before.get(push)
        return self._last_answers.get(before) if before is not None else None


class ShardSpans:
    """The spans of a shard: by push, and by time."""

    def __init__(self, number: int, spans: Iterable[Span]) -> None:
        self.who = Who("shard", shard=number)
        self.own: dict[Push, list[Span]] = defaultdict(list)
        self.apply: dict[Push, Span] = {}
        self.lease: dict[tuple[int, int], Span] = {}
        """On shard 0, by worker and its number of batches: the last one."""
        self._timed: list[Span] = []
        self._long: list[int] = []
        self._buckets: dict[int, list[int]] = defaultdict(list)
        """Indices of `_timed`."""
        for span in spans:
            if span.name == "lease":
                self.lease[span.pushes[0][0], span.version] = span
                continue
            for push in span.pushes:
                if span.name == "apply":
                    self.apply[push] = span
                else:
                    self.own[push].append(span)
            if span.name in ("log", "standby", "apply"):
                self._timed.append(span)
                index = len(self._timed) - 1
                if span.seconds > MAX_BUCKETED_SECONDS:
                    self._long.append(index)
                    continue
                first, last = int(span.began // BUCKET_SECONDS), int(span.ended // BUCKET_SECONDS)
                for bucket in range(first, last + 1):
                    self._buckets[bucket].append(index)

    def received(self, push: Push) -> float | None:
        """Return when the last byte of the push was received."""
        return min((s.ended for s in self.own[push] if s.name == "receive"), default=None)

    def answered(self, push: Push) -> float | None:
        """Return when the last byte of the answer was sent."""
        return max((s.ended for s in self.own[push] if s.name == "send"), default=None)

    def ready(self, push: Push) -> float | None:
        """Return when the push could be reported to shard 0."""
        apply = self.apply.get(push)
        if apply is None:
            return None
        names, limit = ("receive", "check", "log", "standby"), apply.began + TOLERANCE_SECONDS
        ends = [s.ended for s in self.own[push] if s.name in names and s.ended <= limit]
        return max(ends, default=None)

    def during(self, began: float, ended: float, names: Sequence[str]) -> list[Span]:
        """Return the spans of these names (log, standby, apply) around this time."""
        first, last = int(began // BUCKET_SECONDS), int(ended // BUCKET_SECONDS)
        found = set(self._long)
        if last - first > len(self._buckets):
            found.update(*self._buckets.values())
        else:
            found.update(*(self._buckets.get(number, ()) for number in range(first, last + 1)))
        spans = (self._timed[index] for index in sorted(found))
        return [s for s in spans if s.name in names and s.began < ended and s.ended > began]

    def parts(
        self,
        began: float,
        ended: float,
        rest: tuple[str, Who],
        first: Iterable[Span] = (),
        names: Sequence[str] = ("log", "standby", "apply"),
    ) -> list[WaitPart]:
        """Divide a time among the shard's spans.

        Args:
            began: The time's start, on the shard's clock.
            ended: Its end.
            rest: Phase and who of what no span covers.
            first: Spans that take precedence.
            names: Names of the other spans that count.
        """
        if ended <= began:
            return []
        seconds = _covered(list(first), self.during(began, ended, names), began, ended)
        parts = [WaitPart(each, phase, self.who) for phase, each in seconds.items()]
        left = ended - began - sum(seconds.values())
        return [*parts, WaitPart(left, *rest)]


def _covered(
    first: Sequence[Span], others: Iterable[Span], began: float, ended: float
) -> dict[str, float]:
    """Return the seconds by name of the span that is the innermost one at each time."""
    ranked = [(1, span) for span in first] + [(0, span) for span in others]
    ranked = [each for each in ranked if each[1].began < ended and each[1].ended > began]
    ranked.sort(key=lambda each: each[1].began, reverse=True)
    times = {began, ended}
    for _, span in ranked:
        times |= {max(began, span.began), min(ended, span.ended)}
    seconds: dict[str, float] = defaultdict(float)
    running: list[tuple[int, float, float, str]] = []  # the innermost one is the first
    for start, stop in pairwise(sorted(times)):
        while ranked and ranked[-1][1].began <= start:
            rank, span = ranked.pop()
            heappush(running, (-rank, -span.began, span.ended, span.name))
        while running and running[0][2] <= start:
            heappop(running)
        if running:
            seconds[running[0][3]] += stop - start
    return {{"copy": "send"}.get(name, name): value for name, value in seconds.items()}


class CoordinatorSpans:
    """The coordinator's spans, which are in the process of shard 0."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.barrier: dict[tuple[int, int, int], Span] = {}
        """By worker, push and shard: of the first report."""
        self.decide: dict[Push, Span] = {}
        self._journal: list[Span] = []
        for span in spans:
            if span.name == "barrier" and span.pushes:
                self.barrier.setdefault((*span.pushes[0], span.shard), span)
            elif span.name == "decide":
                self.decide.update(dict.fromkeys(span.pushes, span))
        self._reports = sorted(self.barrier.values(), key=lambda each: each.began)
        self._arrivals = [each.began for each in self._reports]

    def trigger(self, decide: Span) -> Span | None:
        """Return the barrier of the report that decided an update, None if none did."""
        index = bisect_right(self._arrivals, decide.began + TOLERANCE_SECONDS) - 1
        if index < 0 or self._arrivals[index] < decide.began - TOLERANCE_SECONDS:
            return None
        return self._reports[index]
