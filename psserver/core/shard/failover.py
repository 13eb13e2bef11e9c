"""Failover: when a standby becomes primary.

Theory of operation. The standby loads the primary's state, follows its records and measures how
long the primary is silent. After TAKEOVER_TIMEOUT_SECONDS it tries to take over: it swaps the
primary record for one that names itself, with the next term. The swap succeeds only while the
record names this standby as in sync in the term whose state it has. The machine has no thread,
clock or network; replication.py describes the primary's side.

States: loading, following (`has_state`), primary (after `take_over`).
Events: a primary begins to send its state, a message arrives, the state is complete, time
passes, a handover is complete.
Invariants: a standby without the complete state never takes over. A standby that takes over by the
swap, or after a handover, has all records whose replies have left. Without a lease store an
operator may promote a standby that lacks some of them.
"""

from dataclasses import dataclass
from typing import Protocol

TAKEOVER_TIMEOUT_SECONDS = 2.0
"""Silence of the primary after which its standby tries to take over."""


@dataclass(frozen=True, slots=True)
class PrimaryRecord:
    """The content of a shard's failover lock.

    Attributes:
        term: Counter that grows with every new primary.
        holder: Address of the primary.
        in_sync: Id of the standby that may take over, because it has every record whose effect
            the primary has published. Empty: no standby may.
    """

    term: int
    holder: str
    in_sync: str = ""


class LeaseStore(Protocol):
    """One record that all servers of a shard share, with compare-and-swap.

    Both methods raise OSError.
    """

    def read(self) -> PrimaryRecord | None:
        """Return the record; None before the first primary."""
        ...

    def swap(self, old: PrimaryRecord | None, new: PrimaryRecord) -> bool:
        """Replace `old` by `new`. Return False, and change nothing, if the record is not `old`."""
        ...


def acquire_primary_record(lease: LeaseStore | None, address: str) -> PrimaryRecord | None:
    """Return the record under which a server that starts as primary is primary.

    None: a standby is in sync and may have taken over. The caller checks whether the holder is
    still running.
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
    """The standby's side of failover.

    Attributes:
        standby_id: Id of this process.
        address: Where it will serve as primary.
        term: Term of the primary that it follows.
        has_state: Whether it has the complete state of that primary.
        is_handover_complete: Whether that primary has handed over, and this standby has all its
            records.
    """

    def __init__(self, standby_id: str, address: str, lease: LeaseStore | None, now: float) -> None:
        self.standby_id, self.address = standby_id, address
        self.term = 0
        self.has_state = self.is_handover_complete = False
        self._lease = lease
        self._last_contact_at = now

    def begin_loading(self, term: int) -> bool:
        """Start to load a primary's state. Return False for a primary of a lower term."""
        if term < self.term:
            return False
        self.term = term
        self.has_state = self.is_handover_complete = False
        return True

    def note_contact(self, now: float) -> None:
        """Note that the primary is alive."""
        self._last_contact_at = now

    def silence_seconds(self, now: float) -> float:
        """Return the time since the primary's last message."""
        return now - self._last_contact_at

    def is_takeover_due(self, now: float) -> bool:
        """Return whether the standby should try to take over."""
        return (
            self._lease is not None
            and self.has_state
            and self.silence_seconds(now) >= TAKEOVER_TIMEOUT_SECONDS
        )

    def take_over(self) -> PrimaryRecord | None:
        """Return the record under which this standby is primary.

        None: it must not be. Either the primary continued without it, or another server is
        primary.
        """
        if self._lease is None:
            return PrimaryRecord(self.term + 1, self.address)
        found = self._lease.read()
        if (
            found is None
            or not self.has_state
            or found.term != self.term
            or found.in_sync != self.standby_id
        ):
            return None
        new = PrimaryRecord(found.term + 1, self.address)
        return new if self._lease.swap(found, new) else None

    @property
    def is_complete(self) -> bool:
        """Whether no process knows more than this standby; meaningful after it took over."""
        return self.is_handover_complete or self._lease is not None
