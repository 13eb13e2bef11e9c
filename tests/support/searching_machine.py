"""A coordinator that searches at each event for what the shipped one keeps up to date.

It is how rounds were chosen before their cost was made independent of the number of workers, and
the reference for tests: both must take the same decisions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pscommon.core.log_entries import PushKey, ShardReport
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.coordinator.participation import Participation
from psserver.core.coordinator.push_reports import PushReports
from psserver.core.coordinator.update_rounds import UpdateRounds
from psserver.core.job.entry_log import EntryLog
from psserver.core.job.pending_pushes import PendingPushes
from psserver.core.job.policy import Policy
from psserver.core.shard.state_machine import GIVEN_UP
from psserver.core.workers.members import WorkerState


def choose(
    job_policy: Policy, clocks: Mapping[int, int], ready: Mapping[int, PushKey]
) -> Sequence[PushKey]:
    """Return the pushes that make the next update, in the order in which they are summed.

    Args:
        job_policy: The policy.
        clocks: Clock of every active worker, in worker order.
        ready: Oldest ready push of each active worker that has one, in order of arrival.
    """
    if job_policy.barrier:
        enough = max(1, len(clocks) - job_policy.backup)
        return (
            [ready[worker] for worker in clocks if worker in ready] if len(ready) >= enough else []
        )
    for worker, key in ready.items():
        if within_bound(job_policy, clocks, worker):
            return [key]
    return []


def within_bound(job_policy: Policy, clocks: Mapping[int, int], worker: int) -> bool:
    """Return whether this worker may finish one more step now."""
    if job_policy.bound is None:
        return True
    after = clocks[worker] + 1
    return (
        after - min([after, *(clock for other, clock in clocks.items() if other != worker)])
        <= job_policy.bound
    )


def clocks_of(coordinator: CoordinatorMachine) -> dict[int, int]:
    """Return the clock of every active worker, in worker order."""
    return {
        m.worker: m.clock for m in coordinator.membership.current() if m.state is WorkerState.ACTIVE
    }


def oldest_ready(coordinator: CoordinatorMachine) -> dict[int, PushKey]:
    """Return each active worker's oldest ready push, in order of arrival. Wake idle workers."""
    oldest: dict[int, PushKey] = {}
    for key in coordinator.pending.ready:
        member = coordinator.membership.members[key.worker]
        if member.state is WorkerState.IDLE:
            coordinator.participation.wake(member)
        if member.state is WorkerState.ACTIVE and (
            key.worker not in oldest or key.seq < oldest[key.worker].seq
        ):
            oldest[key.worker] = key
    return oldest


def reject_unfit(rounds: UpdateRounds, now: float) -> None:
    """Reject pushes that are too old, too large or superseded."""
    job = rounds._job
    for key in given_up(job.pending):
        rounds.reject(key, "STALE", GIVEN_UP)
    limit = 0 if job.policy.backup else job.policy.max_staleness
    for key, staged in list(job.pending.ready.items()):
        if key not in job.pending.ready:
            continue
        behind = job.version - staged.base
        if not staged.samples:
            rounds._set_buffers(staged)
        elif limit is not None and behind > limit:
            rounds.reject(key, "STALE", f"computed from version {staged.base}, {behind} ago")
            if job.policy.backup and job.rules.late == "drop":
                rounds._drop(staged)
        elif job.rules.max_norm and job.rules.bad_gradients != "clip":
            norm = job.pending.norm(key)
            if not norm <= job.rules.max_norm:
                member = job.membership.members[key.worker]
                rounds.reject_bad(
                    staged, "OUTLIER", f"{member}: its gradient's norm is {norm:.6g}", now
                )


def given_up(pending: PendingPushes) -> list[PushKey]:
    return [
        key
        for worker, pushes in pending._reports.items()
        if len(pushes) > 1
        for seq in sorted(pushes)[:-1]
        if (key := PushKey(worker, seq)) not in pending.ready
    ]


def end_loops(participation: Participation) -> None:
    membership = participation._job.membership
    for number in sorted({m.waiting for m in membership.current() if m.waiting is not None}):
        loop = participation._job.ledger.loops[number]
        if loop.done:
            loop.end()
        for member in membership.current():
            if member.waiting == number and (loop.ended or loop.has_dealt(member.worker)):
                participation.wake(member)


def process(reports: PushReports, report: ShardReport, now: float) -> None:
    job = reports._job
    if report.log_id != job.log_id:
        return
    job.log.reached(report.shard, report.index)
    if job.is_of_shard_count(report):
        for staged in report.staged:
            reports._record_staged(report, staged, now)
        if job.pending.measurement is not None:
            job.pending.measurement.take(report)
    reports._rounds.advance(now)


def reached(log: EntryLog, shard: int, index: int) -> None:
    if shard not in log._reached:
        return
    log._set_reached({**log._reached, shard: max(log._reached[shard], index)})
    for carried_out in range(log.base + 1, min(log._reached.values()) + 1):
        log._entries.pop(carried_out, None)
        log._digests.pop(carried_out - 1, None)


def search_in(coordinator: CoordinatorMachine) -> None:
    """Let a coordinator search."""
    chosen: list[dict[int, PushKey]] = [{}]

    def wake_pushing_workers() -> None:
        chosen[0] = oldest_ready(coordinator)

    rounds: Any = coordinator.rounds
    rounds._wake_pushing_workers = wake_pushing_workers
    rounds._choose = lambda: choose(coordinator.job.policy, clocks_of(coordinator), chosen[0])
    rounds._reject_unfit = lambda now: reject_unfit(rounds, now)
    participation: Any = coordinator.participation
    participation.end_loops = lambda: end_loops(participation)
    reports: Any = coordinator.reports
    reports.process = lambda report, now: process(reports, report, now)
    log: Any = coordinator.log
    log.reached = lambda shard, index: reached(log, shard, index)


class SearchingMachine(CoordinatorMachine):
    """The machine; the text of the module describes it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        search_in(self)
