"""When a standby becomes primary, as a machine without threads, clock or network: see
core/shipping.py.
"""

from psserver.core.shard.primary_lease import LeaseStore, PrimaryRecord
from psserver.core.shard.replication import OLDEST_LOOK

TAKEOVER = 2.0
"""Seconds of the primary's silence after which its standby tries to take over."""

MARGIN = 0.15
"""More than a clock can run ahead of another in OLDEST_LOOK."""


def begin_tenure(lease: LeaseStore | None, address: str) -> PrimaryRecord | None:
    """What a server that was started as primary is primary by; None: it must not be, because a
    standby may be.

    Whether the holder still lives is for the caller to find out.
    """
    found = lease.read() if lease is not None else None
    if lease is None or found is None:
        new = PrimaryRecord(1, address)
    elif found.in_sync:
        return None
    else:
        new = PrimaryRecord(found.term + 1, address)
    return new if lease is None or lease.swap(found, new) else None


class FailoverMachine:
    """The standby's end. name: of this process; address: where it will be primary.

    loaded: it has the whole state of the primary of this term. handed_over: and all that this
    primary ever told, which has ended for it.
    """

    def __init__(self, name: str, address: str, lease: LeaseStore | None, now: float) -> None:
        self.name, self.address = name, address
        self.term = 0
        self.sync = True
        self.loaded = self.handed_over = False
        self._lease = lease
        self._heard = now

    def begins(self, term: int, sync: bool) -> bool:
        """A primary begins to send its whole state. False: it is not of the highest term, and
        not to be listened to.
        """
        if term < self.term:
            return False
        self.term, self.sync, self.loaded, self.handed_over = term, sync, False, False
        return True

    def hear(self, now: float) -> None:
        """The primary lives."""
        self._heard = now

    def silent(self, now: float) -> float:
        """Seconds since the primary's last word."""
        return now - self._heard

    def due(self, now: float) -> bool:
        """Is it time to try?"""
        return self._lease is not None and self.loaded and self.silent(now) >= TAKEOVER

    def take_over(self) -> PrimaryRecord | None:
        """What this one is primary by; None: it may not be, for the primary went on without it,
        or somebody else is.
        """
        if self._lease is None:
            return PrimaryRecord(self.term + 1, self.address)
        found = self._lease.read()
        if (
            found is None
            or not self.loaded
            or found.term != self.term
            or found.in_sync != self.name
        ):
            return None
        new = PrimaryRecord(found.term + 1, self.address)
        return new if self._lease.swap(found, new) else None

    @property
    def whole(self) -> bool:
        """Once it has taken over: does nobody know more than it has?"""
        return self.handed_over or (self.sync and self._lease is not None)

    @property
    def pause(self) -> float:
        """Seconds to wait before the first answer: so long another one may believe that it is
        primary.
        """
        return 0.0 if self.whole or self._lease is None else OLDEST_LOOK + MARGIN
