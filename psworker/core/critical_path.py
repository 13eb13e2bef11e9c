"""The spans of a trace by push, and what a worker's push waited for, backwards.

A wait is a list of parts. Parts come from differences within one process, so that the offsets of
clocks do not matter: a link is what a round trip took longer than the work at its other end.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache

from pscommon.tracing.spans import Span
from psworker.core.indexed_spans import (
    COORDINATOR,
    TOLERANCE_SECONDS,
    UNKNOWN,
    CoordinatorSpans,
    Push,
    ShardSpans,
    WaitPart,
    Who,
    WorkerSpans,
)
from psworker.core.trace_events import Trace


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

    def lease(self, worker: int, span: Span) -> list[WaitPart]:
        """Divide a worker's request for batches: its link to shard 0, and what shard 0 did."""
        link, here = Who("link", worker), self.shards.get(0)
        there = here.lease.get((worker, span.version)) if here else None
        if here is None or there is None:
            return [WaitPart(span.seconds, "lease", COORDINATOR)]
        rest = ("lease", COORDINATOR)
        parts = here.parts(there.began, there.ended, rest, names=("log", "standby"))
        parts = limited(span.seconds, parts)
        return [*parts, WaitPart(span.seconds - sum(each.seconds for each in parts), "link", link)]

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
        for phase in ("gather", "compute"):
            yield WaitPart(worker.seconds(push[1], phase), phase, who)
        leases = [part for span in worker.leases(push[1]) for part in self.lease(push[0], span)]
        yield from leases
        loading = worker.seconds(push[1], "data") - sum(part.seconds for part in leases)
        yield WaitPart(max(0.0, loading), "data", who)
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
