"""Checks a run: the journals of its workers against the final state of its servers.

Each rule is a function. A push without an answer may or may not count. A logged rollback to version
R removes updates above R; acknowledged pushes above R are then in doubt. With a log there are no
rollbacks.
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
"""The mean of ones of several workers is not exactly one."""


@dataclass(frozen=True)
class Rollback:
    """A logged rollback: monotonic time, and the version that remained."""

    time: float
    version: int


@dataclass
class Evidence:
    """Operations of a run and its final state.

    policy, staleness, max_staleness, durability: flags of the servers.
    status, counters: final status and final weights, empty if unknown.
    stopped_at: time of ps-ctl stop, which ends the loops of workers.
    """

    operations: Sequence[Operation]
    policy: str = "sync"
    staleness: int | None = None
    max_staleness: int | None = None
    durability: str = "snapshot"
    rollbacks: Sequence[Rollback] = ()
    status: dict[str, Any] = field(default_factory=dict)
    counters: tuple[float, ...] = ()
    stopped_at: float = inf

    @property
    def applied(self) -> list[Operation]:
        """Acknowledged pushes."""
        return [operation for operation in self.operations if operation.applied]

    def survives(self, push: Operation) -> bool:
        """Return whether this acknowledged push is certainly in the final weights."""
        return not any(
            push.begin < rollback.time and push.after > rollback.version
            for rollback in self.rollbacks
        )

    def in_doubt(self) -> list[Operation]:
        """Return pushes that may or may not be in the final weights."""
        return [o for o in self.operations if o.doubtful or (o.applied and not self.survives(o))]


@dataclass(frozen=True)
class Finding:
    rule: str
    text: str


def check(evidence: Evidence) -> list[Finding]:
    """Return all violations."""
    return [Finding(name, text) for name, rule in RULES.items() for text in rule(evidence)]


def versions_never_go_back(evidence: Evidence) -> Iterator[str]:
    """A worker never observes an older version; a rejoined worker is a new worker."""
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
    """Reads after an acknowledgement contain the update, unless a rollback removed it."""
    ends, highest = [-inf], [(-1, "")]
    for push in sorted(evidence.applied, key=lambda o: o.end):
        ends.append(push.end)
        highest.append(max(highest[-1], (push.after, push.process)))
    for read in evidence.operations:
        if read.after < 0:
            continue
        version, process = highest[bisect_right(ends, read.begin) - 1]
        allowed = min(
            [
                version,
                *(rollback.version for rollback in evidence.rollbacks if rollback.time <= read.end),
            ]
        )
        if read.after < allowed:
            yield (
                f"{read.process} saw version {read.after} at {read.begin:.3f}, "
                f"after {version} was acknowledged to {process}"
            )


def log_never_goes_back(evidence: Evidence) -> Iterator[str]:
    """With --durability log a restart causes no rollback."""
    if evidence.durability == "log":
        yield from (
            f"went back to version {rollback.version} at {rollback.time:.3f}"
            for rollback in evidence.rollbacks
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
    """Counted gradients respect --max-staleness, are fresh under sync, and respect the clocks of
    ssp.
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
            since = _base_requested_at(evidence, push)
            other_workers = {o.worker for o in pushes if o.end >= since and o.begin <= push.end} - {
                push.worker
            }
            # each other worker may be S steps behind to S ahead; the push itself adds one step
            bound = min(bound, len(other_workers) * (2 * evidence.staleness + 1))
        if push.staleness > bound:
            staleness = f"stale by {push.staleness} (at most {bound:g})"
            yield f"worker {push.worker}, push {push.seq} counted, {staleness}"


def _base_requested_at(evidence: Evidence, push: Operation) -> float:
    """Return when the worker requested the weights that its gradient was computed from."""
    asked = [
        o.begin for o in evidence.operations if o.worker == push.worker and o.after == push.before
    ]
    return max((begin for begin in asked if begin < push.begin), default=push.begin)


def batches_count_once(evidence: Evidence) -> Iterator[str]:
    """Applies to sync. Other policies may compute a batch twice; see `duplicates`."""
    if evidence.policy == "sync":
        for batch, pushes in committed(evidence).items():
            if len(pushes) > 1:
                pushers = ", ".join(f"{push.process} push {push.seq}" for push in pushes)
                yield f"batch {batch[1]} of loop {batch[0]} counted {len(pushes)} times: {pushers}"


def loops_are_complete(evidence: Evidence) -> Iterator[str]:
    """Each batch of an ended loop has been used."""
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
    """The counters on every shard equal the version, since each update adds 1."""
    for read in evidence.operations:
        if (
            read.after >= 0
            and read.counters
            and min(read.counters) < read.after - TOLERANCE * max(1, read.after)
        ):
            yield (
                f"{read.process} saw counters {read.counters} in version {read.after} "
                f"at {read.begin:.3f}"
            )
    version = evidence.status.get("version")
    if version is not None and any(abs(value - version) > TOLERANCE for value in evidence.counters):
        yield f"the counters are {evidence.counters} in the final version {version}"


def acknowledged_is_recovered(evidence: Evidence) -> Iterator[str]:
    """Acknowledged updates are in the final weights; without a barrier each push is one update."""
    version = evidence.status.get("version")
    if version is None:
        yield f"the final version is unknown: {evidence.status.get('problem', 'no status')}"
        return
    pushes = [push for push in evidence.applied if evidence.survives(push)]
    newest = max((push.after for push in pushes), default=0)
    if newest > version:
        yield f"version {newest} was acknowledged, but the final version is {version}"
    if evidence.policy != "sync":
        certain_count = len({push.key for push in pushes})
        if not certain_count <= version <= certain_count + len(evidence.in_doubt()):
            yield (
                f"{certain_count} pushes were acknowledged, "
                f"{len(evidence.in_doubt())} are in doubt: not {version} updates"
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
    """Return acknowledged pushes that are certainly in the final weights, by batch."""
    found = defaultdict(list)
    for push in evidence.applied:
        if evidence.survives(push):
            for batch in push.batches:
                found[batch].append(push)
    return found


def duplicates(evidence: Evidence) -> int:
    """Return how many batches counted again, which async and ssp allow."""
    return sum(len(pushes) - 1 for pushes in committed(evidence).values())


def ended_loops(evidence: Evidence) -> dict[int, int]:
    """Return the total number of batches of each loop that a worker finished."""
    return {
        lease.batches[0][0]: lease.total
        for lease in evidence.operations
        if lease.kind == "lease"
        and lease.ended
        and lease.batches
        and lease.end < evidence.stopped_at
    }
