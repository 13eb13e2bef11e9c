"""Judges a run by what its workers wrote down and by what the servers hold in the end. Each rule
is a function.

What is allowed: a push whose answer never came may have counted or not; after an announced
rollback to version R the updates above R are gone, and pushes that were acknowledged above R are
in doubt. With a log nothing goes back.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Any

from tests.chaos.journal import Operation

TOLERANCE = 0.01
"""A mean of ones over workers is not one to the last bit."""


@dataclass(frozen=True)
class Rollback:
    """Announced by the servers at this time of the monotonic clock; version: to which they went
    back.
    """

    time: float
    version: int


@dataclass
class Evidence:
    """policy, staleness, max_staleness, durability: as the servers' flags. status, counters: of
    the end, when nobody pushes any more, as GetStatus says and as in the weights; empty where
    they are not known. told_to_end: when the job was, which ends the loops of its workers
    wherever they are."""

    operations: Sequence[Operation]
    policy: str = "sync"
    staleness: int | None = None
    max_staleness: int | None = None
    durability: str = "snapshot"
    rollbacks: Sequence[Rollback] = ()
    status: dict[str, Any] = field(default_factory=dict)
    counters: tuple[float, ...] = ()
    told_to_end: float = inf

    @property
    def applied(self) -> list[Operation]:
        """Pushes that were acknowledged as counted."""
        return [operation for operation in self.operations if operation.applied]

    def survives(self, push: Operation) -> bool:
        """Is this acknowledged push certainly in the weights of the end?"""
        return not any(
            push.begin < back.time and push.after > back.version for back in self.rollbacks
        )

    def in_doubt(self) -> list[Operation]:
        """Pushes that may be in the weights of the end, or not."""
        return [o for o in self.operations if o.doubtful or (o.applied and not self.survives(o))]


@dataclass(frozen=True)
class Finding:
    rule: str
    text: str


def check(evidence: Evidence) -> list[Finding]:
    """All that is wrong; empty if nothing is."""
    return [Finding(name, text) for name, rule in RULES.items() for text in rule(evidence)]


def versions_never_go_back(evidence: Evidence) -> Iterator[str]:
    """What one worker sees. One that has come again is another worker."""
    by_worker = defaultdict(list)
    for operation in evidence.operations:
        if operation.after >= 0:
            by_worker[operation.process, operation.worker].append(operation)
    for (process, worker), operations in by_worker.items():
        for before, after in pairwise(operations):
            if after.after < before.after:
                versions = f"version {after.after} after {before.after}"
                yield f"{process}, worker {worker}: {versions}, at {after.begin:.3f}"


def acknowledged_is_seen_by_all(evidence: Evidence) -> Iterator[str]:
    """What begins after an update was acknowledged sees that update, whoever looks; less only
    after a rollback.
    """
    ends, highest = [-inf], [(-1, "")]
    for push in sorted(evidence.applied, key=lambda o: o.end):
        ends.append(push.end)
        highest.append(max(highest[-1], (push.after, push.process)))
    for look in evidence.operations:
        if look.after < 0:
            continue
        version, process = highest[bisect_right(ends, look.begin) - 1]
        allowed = min(
            [version, *(back.version for back in evidence.rollbacks if back.time <= look.end)]
        )
        if look.after < allowed:
            yield (
                f"{look.process} saw version {look.after} at {look.begin:.3f}, "
                f"after {version} was told to {process}"
            )


def log_never_goes_back(evidence: Evidence) -> Iterator[str]:
    """With --durability log a restart loses nothing."""
    if evidence.durability == "log":
        yield from (
            f"went back to version {back.version} at {back.time:.3f}" for back in evidence.rollbacks
        )


def keys_count_once(evidence: Evidence) -> Iterator[str]:
    """Two acknowledged pushes never share a key, and a key has one gradient."""
    seen: dict[tuple[int, int], Operation] = {}
    for push in evidence.operations:
        if push.kind != "push" or not push.seq:
            continue
        first = seen.setdefault(push.key, push)
        if first is not push and first.crc != push.crc:
            processes = f"({first.process}, {push.process})"
            yield f"worker {push.worker}, push {push.seq} has two gradients {processes}"
        elif first is not push and first.applied and push.status == "applied":
            processes = f"({first.process}, {push.process})"
            yield f"worker {push.worker}, push {push.seq} counted twice {processes}"


def staleness_is_bounded(evidence: Evidence) -> Iterator[str]:
    """By --max-staleness; in sync a gradient is of the version that it changes; ssp bounds
    clocks, and so versions.
    """
    pushes = [o for o in evidence.operations if o.kind == "push"]
    for push in evidence.applied:
        bound = inf if evidence.max_staleness is None else float(evidence.max_staleness)
        if evidence.policy == "sync":
            bound = min(bound, 0)
        elif (
            evidence.policy == "ssp"
            and evidence.staleness is not None
            and push.staleness > evidence.staleness
        ):
            since = _based(evidence, push)
            around = {o.worker for o in pushes if o.end >= since and o.begin <= push.end} - {
                push.worker
            }
            # from S behind to S ahead of it, and the step of its own that this push is
            bound = min(bound, len(around) * (2 * evidence.staleness + 1))
        if push.staleness > bound:
            staleness = f"stale by {push.staleness} (at most {bound:g})"
            yield f"worker {push.worker}, push {push.seq} counted, {staleness}"


def _based(evidence: Evidence, push: Operation) -> float:
    """When its worker asked for the weights that the gradient was computed from: their answer
    may have come late.
    """
    asked = [
        o.begin for o in evidence.operations if o.worker == push.worker and o.after == push.before
    ]
    return max((begin for begin in asked if begin < push.begin), default=push.begin)


def batches_count_once(evidence: Evidence) -> Iterator[str]:
    """In sync. Elsewhere a batch may be computed twice; see `duplicates`."""
    if evidence.policy == "sync":
        for batch, pushes in committed(evidence).items():
            if len(pushes) > 1:
                who = ", ".join(f"{push.process} push {push.seq}" for push in pushes)
                yield f"batch {batch[1]} of loop {batch[0]} counted {len(pushes)} times: {who}"


def loops_are_complete(evidence: Evidence) -> Iterator[str]:
    """A loop that has ended has used up each of its batches."""
    used = {batch for push in [*evidence.applied, *evidence.in_doubt()] for batch in push.batches}
    for loop, total in sorted(ended_loops(evidence).items()):
        missing = [number for number in range(total) if (loop, number) not in used]
        if missing:
            yield f"loop {loop} ended without {len(missing)} of {total} batches: {missing[:5]} ..."
    for row in evidence.status.get("data", ()):
        if row["ended"] and row["committed"] + row["dropped"] != row["total"]:
            batches = f"{row['committed']} of {row['total']} batches"
            yield f"the ledger says that loop {row['loop']} ended with {batches}"


def sums_are_right(evidence: Evidence) -> Iterator[str]:
    """Each update adds 1 to the counters, on every shard: they are the version, exactly so when
    nobody pushes.
    """
    for look in evidence.operations:
        if (
            look.after >= 0
            and look.counters
            and min(look.counters) < look.after - TOLERANCE * max(1, look.after)
        ):
            yield (
                f"{look.process} saw counters {look.counters} in version {look.after} "
                f"at {look.begin:.3f}"
            )
    version = evidence.status.get("version")
    if version is not None and any(abs(value - version) > TOLERANCE for value in evidence.counters):
        yield f"the counters are {evidence.counters} in version {version}, in the end"


def acknowledged_is_recovered(evidence: Evidence) -> Iterator[str]:
    """Updates that were acknowledged are there in the end; without a barrier each push is an
    update of its own.
    """
    version = evidence.status.get("version")
    if version is None:
        yield f"nobody knows the version in the end: {evidence.status.get('problem', 'no status')}"
        return
    pushes = [push for push in evidence.applied if evidence.survives(push)]
    newest = max((push.after for push in pushes), default=0)
    if newest > version:
        yield f"version {newest} was acknowledged, and in the end it is {version}"
    if evidence.policy != "sync":
        sure = len({push.key for push in pushes})
        if not sure <= version <= sure + len(evidence.in_doubt()):
            yield (
                f"{sure} pushes were acknowledged, {len(evidence.in_doubt())} are in doubt: "
                f"not {version} updates"
            )


RULES = {
    "versions never go back": versions_never_go_back,
    "acknowledged is seen by all": acknowledged_is_seen_by_all,
    "log never goes back": log_never_goes_back,
    "keys count once": keys_count_once,
    "staleness is bounded": staleness_is_bounded,
    "batches count once": batches_count_once,
    "loops are complete": loops_are_complete,
    "sums are right": sums_are_right,
    "acknowledged is recovered": acknowledged_is_recovered,
}


def committed(evidence: Evidence) -> dict[tuple[int, int], list[Operation]]:
    """Acknowledged pushes that are certainly in the weights of the end, by batch."""
    found = defaultdict(list)
    for push in evidence.applied:
        if evidence.survives(push):
            for batch in push.batches:
                found[batch].append(push)
    return found


def duplicates(evidence: Evidence) -> int:
    """Batches whose gradients counted more than once, which is allowed in async and ssp."""
    return sum(len(pushes) - 1 for pushes in committed(evidence).values())


def ended_loops(evidence: Evidence) -> dict[int, int]:
    """Loops that a worker went through to their end, with the number of their batches."""
    return {
        lease.batches[0][0]: lease.total
        for lease in evidence.operations
        if lease.kind == "lease"
        and lease.ended
        and lease.batches
        and lease.end < evidence.told_to_end
    }
