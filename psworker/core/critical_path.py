"""The spans of a trace by push, and what a worker's push waited for, backwards.

A wait is a list of parts. Parts come from differences within one process, so that the offsets of
clocks do not matter: a link is what a round trip took longer than the work at its other end.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from pscommon.tracing.spans import Span
from psworker.core.trace_events import Trace

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
        for span in sorted(spans, key=lambda each: each.began):
            if not span.pushes:
                continue
            push = span.pushes[0][1]
            if span.name in SCRIPT_SPANS:
                self.script[push].append(span)
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
        self._timed: list[Span] = []
        self._long: list[int] = []
        self._buckets: dict[int, list[int]] = defaultdict(list)
        """Indices of `_timed`."""
        for span in spans:
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


class CriticalPaths:
    """All spans of a trace; finds what a push waited for."""

    def __init__(self, trace: Trace) -> None:
        self.workers: dict[int, WorkerSpans] = {}
        self.shards: dict[int, ShardSpans] = {}
        self._coordinator = CoordinatorSpans(())
        for process in trace.processes:
            if process.role == "worker":
                self.workers[process.number] = WorkerSpans(process.spans)
                continue
            self.shards[process.number] = ShardSpans(process.number, process.spans)
            if process.number == 0:
                self._coordinator = CoordinatorSpans(process.spans)
        # many workers wait for the same push
        self._link, self._report = cache(self._find_link), cache(self._find_report)
        self._decision, self._staging = cache(self._find_decision), cache(self._find_staging)
        self._until_report = cache(lambda *key: by_cause(self._before_report(*key)))

    def wait(self, worker: int, began: float, ended: float) -> list[WaitPart]:
        """Divide a worker's wait into parts; their sum is its length."""
        found = self.workers[worker].last_answer(began, ended)
        if found is None:
            return [WaitPart(ended - began, "other", UNKNOWN)]
        answered, push, shard = found
        parts = limited(answered - began, self._path((worker, push), shard))
        left = ended - began - sum(part.seconds for part in parts)
        return [*parts, WaitPart(left, "other", UNKNOWN)]

    def _path(self, push: Push, shard: int) -> Iterator[WaitPart]:
        """Yield what the answer of a shard waited for, the last part first."""
        here = self.shards.get(shard)
        apply = here.apply.get(push) if here else None
        if here is None or apply is None:
            return
        link = self._link(push, shard)
        yield from (part._replace(seconds=part.seconds / 2) for part in link)
        own = [span for span in here.own[push] if span.name in ("copy", "send")]
        answered = here.answered(push)
        if answered is not None:
            yield from here.parts(apply.ended, answered, ("send", here.who), own)
        yield WaitPart(apply.seconds, "apply", here.who)
        decide = self._coordinator.decide.get(push)
        barrier = self._coordinator.barrier.get((*push, shard))
        if decide is None or barrier is None:
            return
        yield from self._report(push, shard)
        yield from self._decision(decide)
        lateness = decide.began - barrier.began
        if lateness > TOLERANCE_SECONDS:
            parts = limited(lateness, self._lateness(decide, push, shard))
            yield from parts
            yield WaitPart(lateness - sum(part.seconds for part in parts), "other", UNKNOWN)
        yield from self._staging(push, shard)
        yield from (part._replace(seconds=part.seconds / 2) for part in link)
        yield from self._send(push, shard)

    def _find_link(self, push: Push, shard: int) -> list[WaitPart]:
        """Return both ways between a worker and a shard, and applies that kept bytes waiting."""
        worker, here = self.workers.get(push[0]), self.shards.get(shard)
        if worker is None or here is None:
            return []
        sent, back = worker.sent.get((push[1], shard)), worker.received.get((push[1], shard))
        received, answered = here.received(push), here.answered(push)
        if sent is None or back is None or received is None or answered is None:
            return []
        seconds = (back.ended - sent.ended) - (answered - received)
        who = Who("link", push[0], shard)
        return here.parts(received - seconds, received, ("link", who), names=("apply",))

    def _send(self, push: Push, shard: int) -> list[WaitPart]:
        worker = self.workers.get(push[0])
        sent = worker and worker.sent.get((push[1], shard))
        return [WaitPart(sent.seconds, "link", Who("link", push[0], shard))] if sent else []

    def _find_report(self, push: Push, shard: int) -> list[WaitPart]:
        """Return both ways between a shard and shard 0, and what the shard did meanwhile."""
        here, decide = self.shards.get(shard), self._coordinator.decide.get(push)
        barrier = self._coordinator.barrier.get((*push, shard))
        apply, ready = (here.apply.get(push), here.ready(push)) if here else (None, None)
        if here is None or not (apply and decide and barrier) or ready is None:
            return []
        seconds = max(0.0, (apply.began - ready) - (decide.ended - barrier.began))
        rest = ("link", Who("shard link", shard=shard)) if shard else ("decide", COORDINATOR)
        if 2 * seconds >= apply.began - ready:
            parts = here.parts(ready, apply.began, rest)
        else:
            parts = here.parts(ready, ready + seconds, rest)
            parts += here.parts(apply.began - seconds, apply.began, rest)
        spans = limited(seconds, (part for part in parts if part[1:] != rest))
        return [*spans, WaitPart(seconds - sum(part.seconds for part in spans), *rest)]

    def _find_decision(self, decide: Span) -> list[WaitPart]:
        """Return the time of a decision, without what its record waited for."""
        began, ended, pushes = decide.began, decide.ended, set(decide.pushes)
        records = [
            span
            for span in self.shards[0].during(began, ended, ("log", "standby"))
            if span.began >= began - TOLERANCE_SECONDS
            and span.ended <= ended + TOLERANCE_SECONDS
            and (not span.pushes or pushes.intersection(span.pushes))
        ]
        return self.shards[0].parts(began, ended, ("decide", COORDINATOR), records, ())

    def _find_staging(self, push: Push, shard: int) -> list[WaitPart]:
        """Return what a shard did with a push until it could report it."""
        here = self.shards.get(shard)
        began, ended = (here.received(push), here.ready(push)) if here else (None, None)
        if here is None or began is None or ended is None:
            return []
        own = [span for span in here.own[push] if span.name in ("check", "log", "standby")]
        return here.parts(began, ended, ("other", UNKNOWN), own)

    def _lateness(self, decide: Span, push: Push, shard: int) -> Iterator[WaitPart]:
        """Yield what made the deciding push later than this one: where it took longer."""
        trigger = self._coordinator.trigger(decide)
        if trigger is None:
            return
        own: dict[tuple[str, str], float] = defaultdict(float)
        for (phase, who), seconds in self._until_report(push, shard).items():
            own[phase, who.kind] += seconds
        deciding = self._until_report(trigger.pushes[0], trigger.shard)
        for (phase, who), seconds in deciding.items():
            excess = seconds - own.get((phase, who.kind), 0.0)
            if excess > 0:
                yield WaitPart(excess, phase, who)

    def _before_report(self, push: Push, shard: int) -> Iterator[WaitPart]:
        """Yield what a push did until its report, from the answer to the push before."""
        yield from self._report(push, shard)
        yield from self._staging(push, shard)
        yield from self._link(push, shard)
        yield from self._send(push, shard)
        worker, who = self.workers.get(push[0]), Who("worker", push[0])
        if worker is None:
            return
        for phase in ("gather", "compute", "data"):
            yield WaitPart(worker.seconds(push[1], phase), phase, who)
        answer = worker.answer_before(push[1])
        if answer is None:
            return
        yield WaitPart(worker.seconds(answer[0], "scatter"), "scatter", who)
        here, last = self.shards.get(answer[1]), (push[0], answer[0])
        apply, answered = (here.apply.get(last), here.answered(last)) if here else (None, None)
        if here and apply and answered is not None:
            yield WaitPart(answered - apply.ended, "send", here.who)


def limited(seconds: float, parts: Iterable[WaitPart]) -> list[WaitPart]:
    """Return the first parts, up to this sum."""
    taken = []
    for part in parts:
        used = min(part.seconds, seconds)
        if seconds <= 0:
            break
        if used > 0:
            taken.append(part._replace(seconds=used))
            seconds -= used
    return taken


def by_cause(parts: Iterable[WaitPart]) -> dict[tuple[str, Who], float]:
    """Return the sums by phase and who, in their order."""
    sums: dict[tuple[str, Who], float] = {}
    for seconds, phase, who in parts:
        sums[phase, who] = sums.get((phase, who), 0.0) + seconds
    return sums
