"""How each worker fares: live, slow and lost are different states, and call for different
remedies.

Beside the roster's State, which says who takes part, who is lost and who has left. A worker is
slow where its own part of a step (core/pace.py) takes more than TWICE the median of the others',
or where they wait for its push and it has been at the step for longer than that. It is hanging
where its script makes no call, although nothing keeps it waiting (core/roster.py). It is silent
after half a lease without a sign of life: slow or stopped, and soon lost.
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import NamedTuple

from psserver.core.workers.membership import Member, Membership, WorkerState

TWICE = 2.0

SHORTEST = 0.2
"""Seconds: nobody is called slow for a wait that is shorter than this, whatever the steps."""


class WorkerHealth(StrEnum):
    LIVE = "live"
    SLOW = "slow"
    HANGING = "hanging"
    SILENT = "silent"


class WorkerCondition(NamedTuple):
    """seconds: of this worker's own part of a step, that in hand where it is overdue; median: of
    the others'.

    None: not known.
    """

    health: WorkerHealth
    seconds: float | None
    median: float | None


def conditions(roster: Membership, late: Collection[int], now: float) -> dict[int, WorkerCondition]:
    """Of everybody who is here, by worker. late: those whose push would let others go on.

    The servers ask five times a second, so it looks at each worker once, however many there are.
    """
    paces = {m.worker: m.pace.seconds for m in roster.here()}
    known = sorted(s for m in roster.registered() if (s := paces[m.worker]) is not None)
    found = {}
    for member in roster.here():
        seconds = paces[member.worker]
        others = _median_without(known, seconds if member.registered else None)
        condition = _condition(member, seconds, others, member.worker in late, roster.lease, now)
        hangs = roster.is_hanging(member) and condition.health is not WorkerHealth.SILENT
        found[member.worker] = (
            condition._replace(health=WorkerHealth.HANGING) if hangs else condition
        )
    return found


def _median_without(ordered: Sequence[float], one: float | None) -> float | None:
    """Of the others than this one, which is among them if it is not None; None: there are no
    others.
    """
    count = len(ordered) - (one is not None)
    if count == 0:
        return None
    left_out = bisect_left(ordered, one) if one is not None else len(ordered)
    low, high = (count - 1) // 2, count // 2
    return (ordered[low + (low >= left_out)] + ordered[high + (high >= left_out)]) / 2


def _condition(
    member: Member,
    seconds: float | None,
    others: float | None,
    late: bool,
    lease: float,
    now: float,
) -> WorkerCondition:
    overdue = _overdue(member, others, late, now)
    if now - member.heard_at > lease / 2:
        return WorkerCondition(WorkerHealth.SILENT, seconds, others)
    slow = (
        others is not None
        and seconds is not None
        and seconds > TWICE * others
        and member.state is WorkerState.ACTIVE
    )
    return WorkerCondition(
        WorkerHealth.SLOW if slow or overdue else WorkerHealth.LIVE, overdue or seconds, others
    )


def _overdue(member: Member, others: float | None, late: bool, now: float) -> float | None:
    """How long others have waited for a step that should have been over."""
    if not late or others is None or member.pace.since is None:
        return None
    spent = now - member.pace.since
    return spent if spent > max(TWICE * others, SHORTEST) else None
