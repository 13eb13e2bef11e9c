"""Replication of a primary's records to its standby.

Theory of operation. Every change of a shard (and on shard 0 of the coordinator) is a record. The
records of one connection to a standby (a link) are numbered from 1. The machine decides when a
reply that depends on a record may leave the primary (output commit). It has no thread, clock or
network.

States, see ReplicationPhase: ALONE -> LOADING -> CATCHING_UP -> IN_SYNC. Losing the link leads
from each of them to ALONE.

Events: a standby attaches, a record is appended, the standby acknowledges records, the link is
lost, time passes, an operator starts a handover.

The primary record (failover.py) names the primary, its term and the standby in sync. It
changes by compare-and-swap alone: `holder` and `term` when a standby takes over, `in_sync` when a
standby has caught up or is given up.

Invariants:

- A reply leaves the primary only after the standby has acknowledged the record. A standby in sync
  therefore knows everything that any client knows.
- A standby takes over only while the primary record names it as in sync. A primary continues
  without its standby only after it has cleared that name. The two swaps exclude each other: the
  server whose swap fails is not primary, and ends without a reply.
- After `begin_handover` no reply leaves that depends on a later record.

The swap of the primary record has the role of the configuration service in Vertical Paxos
(Lamport, Malkhi, Zhou, 2009).
"""

from dataclasses import replace
from enum import Enum, auto

from psserver.core.shard.failover import LeaseStore, PrimaryRecord

STANDBY_TIMEOUT_SECONDS = 2.0
"""Time without an acknowledgement after which the standby is given up."""

STALLED_STANDBY_SECONDS = 30.0
"""Time after which a standby is given up that sends acknowledgements of no further records."""

LEASE_CHECK_INTERVAL_SECONDS = 0.25
"""Time between two reads of the primary record, which end a primary that an operator replaced."""


class ReplicationPhase(Enum):
    """How far the standby is.

    ALONE: There is no standby.
    LOADING: The standby receives the whole state; replies do not wait for it.
    CATCHING_UP: The standby has the state, and lacks records whose replies have left. Replies
        that depend on later records wait.
    IN_SYNC: The standby has all records whose replies have left.
    """

    ALONE = auto()
    LOADING = auto()
    CATCHING_UP = auto()
    IN_SYNC = auto()


class ReplicationMachine:
    """The primary's side of replication.

    Attributes:
        primary_record: The record under which this process is primary. Without a lease store
            only an operator makes a standby primary.
        phase: How far the standby is.
        standby_id: Id of the standby; empty: none.
        link_id: Number of the connection to a standby, from 1.
        last_sent: Number of the newest record of this link.
        last_acknowledged: Number of the newest record that the standby has.
        deposed_reason: Why this process is not primary any more; it then has to exit.
    """

    def __init__(self, primary_record: PrimaryRecord, lease: LeaseStore | None, now: float) -> None:
        self.primary_record = primary_record
        self.phase = ReplicationPhase.ALONE
        self.standby_id = ""
        self.link_id = self.last_sent = self.last_acknowledged = 0
        self.deposed_reason = ""
        self._lease = lease
        self._lease_read_at = self._last_contact_at = self._last_progress_at = now
        self._catch_up_target = 0  # replies that depend on records up to this one need no standby
        self._handover_end: int | None = None  # the last record whose reply may leave

    @property
    def term(self) -> int:
        return self.primary_record.term

    @property
    def unacknowledged(self) -> int:
        """Number of records that the standby has not acknowledged."""
        return self.last_sent - self.last_acknowledged

    # ---- the link --------------------------------------------------------------------------------

    def attach(self, standby_id: str, now: float) -> int:
        """Start a link to a standby that has no state. Return the link's number."""
        self.drop_link(self.link_id)
        self.link_id += 1
        self.standby_id, self.phase = standby_id, ReplicationPhase.LOADING
        self.last_sent = self.last_acknowledged = self._catch_up_target = 0
        self._last_contact_at = self._last_progress_at = now
        return self.link_id

    def append(self) -> int:
        """Number the next record for the standby. Return 0 where there is none."""
        if self.phase is ReplicationPhase.ALONE:
            return 0
        self.last_sent += 1
        return self.last_sent

    def end_state_transfer(self) -> None:
        """Note that the records so far are the whole state."""
        self._catch_up_target = self.last_sent

    def acknowledge(self, link_id: int, number: int, now: float) -> None:
        """Note that the standby has all records up to this one."""
        if link_id != self.link_id or self.phase is ReplicationPhase.ALONE:
            return
        number = min(number, self.last_sent)  # it cannot have what was not sent
        if number > self.last_acknowledged or not self.unacknowledged:
            self._last_progress_at = now
        self._last_contact_at = now
        self.last_acknowledged = max(self.last_acknowledged, number)
        if (
            self.phase is ReplicationPhase.LOADING
            and 0 < self._catch_up_target <= self.last_acknowledged
        ):
            self.phase, self._catch_up_target = ReplicationPhase.CATCHING_UP, self.last_sent
        if (
            self.phase is ReplicationPhase.CATCHING_UP
            and self._catch_up_target <= self.last_acknowledged
            and self._swap_in_sync(self.standby_id)
        ):
            self.phase = ReplicationPhase.IN_SYNC

    def drop_link(self, link_id: int) -> None:
        """Continue without the standby, if this process still is primary.

        During a handover the primary never continues: a standby that closes the link then is
        about to be primary.
        """
        if link_id != self.link_id or self.phase is ReplicationPhase.ALONE:
            return
        if self.is_handing_over:
            self._verify_primary()
        elif self.phase is not ReplicationPhase.IN_SYNC or self._swap_in_sync(""):
            self.phase, self.standby_id = ReplicationPhase.ALONE, ""

    def tick(self, now: float) -> None:
        """Give up a silent or stalled standby, and read the primary record; call it often."""
        has_waiting_replies = self.phase in (
            ReplicationPhase.CATCHING_UP,
            ReplicationPhase.IN_SYNC,
        )
        is_stalled = (
            has_waiting_replies
            and self.unacknowledged > 0
            and now - self._last_progress_at > STALLED_STANDBY_SECONDS
        )
        is_silent = now - self._last_contact_at > STANDBY_TIMEOUT_SECONDS
        if self.phase is not ReplicationPhase.ALONE and (is_stalled or is_silent):
            self.drop_link(self.link_id)
        if now - self._lease_read_at >= LEASE_CHECK_INTERVAL_SECONDS:
            self._verify_primary()
            self._lease_read_at = now

    # ---- replies ---------------------------------------------------------------------------------

    def can_reply(self, link_id: int, number: int) -> bool:
        """Return whether a reply may leave that depends on this record of a link."""
        if self.deposed_reason or (self._handover_end is not None and number > self._handover_end):
            return False
        if link_id != self.link_id or self.phase in (
            ReplicationPhase.ALONE,
            ReplicationPhase.LOADING,
        ):
            return True
        return number <= max(self._catch_up_target, self.last_acknowledged)

    def begin_handover(self) -> bool:
        """Stop replies to later records. Return False if the standby is not in sync."""
        if self.phase is ReplicationPhase.IN_SYNC and self._handover_end is None:
            self._handover_end = self.last_sent
        return self._handover_end is not None

    @property
    def is_handing_over(self) -> bool:
        """Whether a handover has begun. It cannot be undone."""
        return self._handover_end is not None

    @property
    def is_handover_complete(self) -> bool:
        """Whether the standby has all records whose replies have left, or will."""
        return self._handover_end is not None and self.last_acknowledged >= self._handover_end

    # ---- the primary record ----------------------------------------------------------------------

    def _swap_in_sync(self, in_sync: str) -> bool:
        new = replace(self.primary_record, in_sync=in_sync)
        if self._lease is not None and not self._lease.swap(self.primary_record, new):
            self._depose()
            return False
        self.primary_record = new
        return True

    def _verify_primary(self) -> None:
        if self._lease is not None and self._lease.read() != self.primary_record:
            self._depose()

    def _depose(self) -> None:
        found = self._lease.read() if self._lease is not None else None
        primary = f"{found.holder}, in term {found.term}" if found else "none"
        self.deposed_reason = (
            f"this server is not primary of its shard any more; the primary is {primary}"
        )
