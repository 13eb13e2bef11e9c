"""How each worker fares: live, slow and lost are different states, and call for different remedies.

Beside the roster's State, which says who takes part. A worker is slow where its own part of a step (core/pace.py) takes
more than TWICE the median of the others', or where they wait for its push and it has been at the step for longer than
that. It is silent after half a lease without a sign of life: slow or stopped, and soon lost.
"""

from collections.abc import Collection, Iterable
from enum import StrEnum
from typing import NamedTuple

from psserver.core.pace import median
from psserver.core.roster import Member, Roster, State

TWICE = 2.0

SHORTEST = 0.2
"""Seconds: nobody is called slow for a wait that is shorter than this, whatever the steps."""


class Health(StrEnum):
    LIVE = "live"
    SLOW = "slow"
    SILENT = "silent"
    LOST = "lost"
    LEFT = "left"


class Condition(NamedTuple):
    """seconds: of this worker's own part of a step, that in hand where it is overdue; median: of the others'.

    None: not known.
    """

    health: Health
    seconds: float | None
    median: float | None


def conditions(roster: Roster, late: Collection[int], now: float) -> dict[int, Condition]:
    """Of everybody who was ever here, by worker. late: those whose push would let others go on."""
    here = roster.registered()
    return {m.worker: _condition(m, _median(here, m), m.worker in late, roster.lease, now) for m in roster}


def _median(members: Iterable[Member], but: Member) -> float | None:
    seconds = [m.pace.seconds for m in members if m is not but and m.pace.seconds is not None]
    return median(seconds) if seconds else None


def _condition(member: Member, others: float | None, late: bool, lease: float, now: float) -> Condition:
    seconds = member.pace.seconds
    if not member.alive:
        return Condition(Health.LOST if member.state is State.LOST else Health.LEFT, seconds, others)
    overdue = _overdue(member, others, late, now)
    if now - member.heard_at > lease / 2:
        return Condition(Health.SILENT, seconds, others)
    slow = others is not None and seconds is not None and seconds > TWICE * others and member.state is State.ACTIVE
    return Condition(Health.SLOW if slow or overdue else Health.LIVE, overdue or seconds, others)


def _overdue(member: Member, others: float | None, late: bool, now: float) -> float | None:
    """How long others have waited for a step that should have been over."""
    if not late or others is None or member.pace.since is None:
        return None
    spent = now - member.pace.since
    return spent if spent > max(TWICE * others, SHORTEST) else None
