"""Health of each worker: live, slow, hanging or silent, each with its own remedy.

Health is independent of WorkerState (members.py), which says who takes part.

- A worker is slow if its own part of a step (StepTimer) takes more than SLOW_FACTOR times the
  median of the others, or if others wait for its push and its current step takes that long.
- It is hanging if its script makes no call although it waits for nothing (membership.py).
- It is silent after half a lease without a sign of life: slow or stopped, and soon lost.
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import NamedTuple

from psserver.core.workers.members import Member, WorkerState
from psserver.core.workers.membership import Membership

SLOW_FACTOR = 2.0

MIN_OVERDUE_SECONDS = 0.2
"""A shorter wait makes no worker slow, however short the steps are."""


class WorkerHealth(StrEnum):
    LIVE = "live"
    SLOW = "slow"
    HANGING = "hanging"
    SILENT = "silent"


class WorkerCondition(NamedTuple):
    """Health and step times of one worker; None: not known.

    Attributes:
        seconds: Its own part of a step; of the current one where that is overdue.
        median: The median of the others.
    """

    health: WorkerHealth
    seconds: float | None
    median: float | None


def conditions(
    membership: Membership, late: Collection[int], now: float
) -> dict[int, WorkerCondition]:
    """Return the condition of all current members, by worker.

    The servers ask five times a second, so this is linear in the number of workers.

    late: Workers whose push others wait for.
    """
    leases, found = membership.leases, dict[int, WorkerCondition]()
    step_seconds = {m.worker: m.step_timer.median_seconds for m in membership.current()}
    known = sorted(s for m in membership.registered() if (s := step_seconds[m.worker]) is not None)
    for member in membership.current():
        seconds = step_seconds[member.worker]
        others = _median_without(known, seconds if member.is_registered else None)
        overdue = _overdue(member, others, now) if member.worker in late else None
        if now - member.last_contact_at > leases.seconds / 2:
            found[member.worker] = WorkerCondition(WorkerHealth.SILENT, seconds, others)
            continue
        health = WorkerHealth.LIVE
        if leases.is_hanging(member):
            health = WorkerHealth.HANGING
        elif overdue is not None or _is_slow(member, seconds, others):
            health = WorkerHealth.SLOW
        found[member.worker] = WorkerCondition(health, overdue or seconds, others)
    return found


def _median_without(ordered: Sequence[float], one: float | None) -> float | None:
    """Return the median without one of the values; None where no other is left.

    `one` is among the values if it is not None.
    """
    count = len(ordered) - (one is not None)
    if count == 0:
        return None
    left_out = bisect_left(ordered, one) if one is not None else len(ordered)
    low, high = (count - 1) // 2, count // 2
    return (ordered[low + (low >= left_out)] + ordered[high + (high >= left_out)]) / 2


def _is_slow(member: Member, seconds: float | None, others: float | None) -> bool:
    if others is None or seconds is None or member.state is not WorkerState.ACTIVE:
        return False
    return seconds > SLOW_FACTOR * others


def _overdue(member: Member, others: float | None, now: float) -> float | None:
    """Return the duration of a step that others wait for if it is overdue, or None."""
    if others is None or member.step_timer.started_at is None:
        return None
    spent = now - member.step_timer.started_at
    return spent if spent > max(SLOW_FACTOR * others, MIN_OVERDUE_SECONDS) else None
