"""Leases of the workers: a member without contact for the duration of a lease is lost.

Time is an argument: seconds by the monotonic clock of this host.
"""

import math
from collections.abc import Mapping, Sequence

from psserver.core.workers.members import Member

HANGING_SECONDS = 30.0
"""Time without a call after which a script counts as hanging, or --progress-timeout if shorter."""


class WorkerLeases:
    """Leases of the current members.

    Attributes:
        seconds: Duration of a lease.
        progress_timeout: See JobRules.

    Args:
        current: The current members; their owner keeps this list up to date.
    """

    def __init__(self, seconds: float, current: Sequence[Member]) -> None:
        self.seconds = seconds
        self.progress_timeout: float | None = None
        self._current = current

    def ended(self, now: float) -> list[Member]:
        """Return the members whose lease has ended, or whose process has."""
        return [m for m in self._current if m.death or now - m.last_contact_at > self.seconds]

    def seconds_to_end(self, now: float) -> float:
        """Return the time until the next lease ends; infinite without a running lease."""
        left = (m.last_contact_at + self.seconds - now for m in self._current)
        return min((seconds for seconds in left if seconds >= 0), default=math.inf)

    def extend(self, seconds: float) -> None:
        """Extend all leases by a time for which this process itself was stopped."""
        for member in self._current:
            member.last_seen += seconds
            member.last_moved += seconds
            member.joined_at += seconds
            member.step_timer.add_pause(seconds)

    def renew_by_transfers(self, ages: Mapping[int, float], now: float) -> None:
        """Renew leases from the last transfer; `ages` has the seconds since then by worker."""
        for member in self._current:
            if member.worker in ages:
                member.last_moved = max(member.last_moved, now - ages[member.worker])

    def mark_dead(self, worker: int, proof: str) -> None:
        """End the lease of a worker whose process has ended; earlier messages do not renew it."""
        for member in self._current:
            if member.worker == worker:
                member.death = member.death or proof

    def is_hanging(self, member: Member) -> bool:
        """Return whether a script makes no call although it waits for nothing.

        A long evaluation looks the same.
        """
        limit = min(HANGING_SECONDS, self.progress_timeout or HANGING_SECONDS)
        return member.is_registered and member.heartbeat.no_call_seconds > limit

    def over_progress_timeout(self) -> list[Member]:
        """Return the members that have hung for longer than --progress-timeout."""
        limit = self.progress_timeout
        return [
            m
            for m in self._current
            if limit is not None and m.is_registered and m.heartbeat.no_call_seconds > limit
        ]
