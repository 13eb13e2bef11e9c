"""What a primary may tell while it has a standby, as a machine without threads, clock or
network.

Theory of operation. All that changes a shard (and on shard 0 the coordinator) is a record,
numbered on the line to the standby. sync: nobody is told what came of a record before the
standby has it, so whoever takes over knows all that anybody was told. A standby takes over only
where the tenure says that it is in sync, and a primary whose standby is silent goes on alone
only after it has swapped that for "nobody is". Each of the two swaps voids the other; who comes
second is not primary (any more), and ends without a word.

async does not wait for the standby. There the primary has to look at its tenure instead, and
tells nothing when its last look is older than OLDEST_LOOK; who takes over waits that long before
it answers anybody.
"""

from dataclasses import replace
from enum import Enum, auto

from psserver.core.shard.primary_lease import LeaseStore, PrimaryRecord

SILENCE = 2.0
"""Seconds after which a standby that does not acknowledge any more is given up."""

STALLED = 30.0
"""Seconds after which one is given up that does speak, but does not get on with what is on its
way to it.
"""

LOOK = 0.25
OLDEST_LOOK = 0.5
"""Seconds between two looks at the tenure, and how old the last one may be for an answer, in
async.
"""


class ReplicationPhase(Enum):
    """ALONE: there is no standby. LOADING: the whole state goes to one. CLOSING: it has that,
    and what was told meanwhile is still under way; what is new waits. IN_SYNC: it has all that
    was told."""

    ALONE = auto()
    LOADING = auto()
    CLOSING = auto()
    IN_SYNC = auto()


class ReplicationMachine:
    """The primary's end. tenure: as it stands; without a lease nobody but an operator makes a
    standby primary.

    deposed: why this process is not primary any more; then it may do nothing but end.
    """

    def __init__(
        self, tenure: PrimaryRecord, lease: LeaseStore | None, sync: bool, now: float
    ) -> None:
        self.tenure = tenure
        self.sync = sync
        self.phase = ReplicationPhase.ALONE
        self.standby = ""
        self.line = self.sent = self.acked = 0
        self.deposed = ""
        self._lease = lease
        self._looked = self._heard = self._got_on = now
        self._mark = 0  # the last record that is told without the standby's word
        self._frozen: int | None = None  # the last record that is ever told

    @property
    def term(self) -> int:
        return self.tenure.term

    @property
    def behind(self) -> int:
        """Records that the standby does not have yet."""
        return self.sent - self.acked

    # ---- the line --------------------------------------------------------------------------------

    def attach(self, standby: str, now: float) -> int:
        """A standby is there, with nothing. Returns the number of its line."""
        self.lose(self.line)
        self.line += 1
        self.standby, self.phase = standby, ReplicationPhase.LOADING
        self.sent = self.acked = self._mark = 0
        self._heard = self._got_on = now
        return self.line

    def append(self) -> int:
        """A record goes to the standby; its number, 0 where there is none."""
        if self.phase is ReplicationPhase.ALONE:
            return 0
        self.sent += 1
        return self.sent

    def loaded(self) -> None:
        """The records so far are the whole state."""
        self._mark = self.sent

    def ack(self, line: int, number: int, now: float) -> None:
        """The standby has all records up to this one."""
        if line != self.line or self.phase is ReplicationPhase.ALONE:
            return
        self._got_on = now if number > self.acked or not self.behind else self._got_on
        self._heard, self.acked = now, max(self.acked, number)
        if self.phase is ReplicationPhase.LOADING and 0 < self._mark <= self.acked:
            self.phase, self._mark = ReplicationPhase.CLOSING, self.sent
        if (
            self.phase is ReplicationPhase.CLOSING
            and self._mark <= self.acked
            and self._swap(self.standby)
        ):
            self.phase = ReplicationPhase.IN_SYNC

    def lose(self, line: int) -> None:
        """The line is cut, or silent: go on alone, if nobody else is primary. Who hands over
        never goes on: a standby that hangs up then is about to be primary."""
        if line != self.line or self.phase is ReplicationPhase.ALONE:
            return
        if self.hands_over:
            self._compare()
        elif self.phase is not ReplicationPhase.IN_SYNC or self._swap(""):
            self.phase, self.standby = ReplicationPhase.ALONE, ""

    def tick(self, now: float) -> None:
        """Time passes; call it several times a second."""
        waited_for = self.phase in (ReplicationPhase.CLOSING, ReplicationPhase.IN_SYNC)
        stalled = waited_for and self.behind > 0 and now - self._got_on > STALLED
        if self.phase is not ReplicationPhase.ALONE and (stalled or now - self._heard > SILENCE):
            self.lose(self.line)
        if now - self._looked >= LOOK:
            self._look(now)

    # ---- telling ---------------------------------------------------------------------------------

    def may_tell(self, line: int, number: int, now: float) -> bool:
        """May somebody learn what came of this record of a line?"""
        if self.deposed or (self._frozen is not None and number > self._frozen):
            return False
        if not self.sync:
            if now - self._looked > OLDEST_LOOK:
                self._look(now)
            return not self.deposed
        if line != self.line or self.phase in (ReplicationPhase.ALONE, ReplicationPhase.LOADING):
            return True
        return number <= max(self._mark, self.acked)

    def freeze(self) -> bool:
        """Nothing more will be told, for the standby is to be primary. False: it is not in sync."""
        if self.phase is ReplicationPhase.IN_SYNC and self._frozen is None:
            self._frozen = self.sent
        return self._frozen is not None

    @property
    def hands_over(self) -> bool:
        """The standby is to be primary: with this one it is over."""
        return self._frozen is not None

    @property
    def handed_over(self) -> bool:
        """The standby has all that was ever told."""
        return self._frozen is not None and self.acked >= self._frozen

    # ---- the tenure ------------------------------------------------------------------------------

    def _swap(self, in_sync: str) -> bool:
        new = replace(self.tenure, in_sync=in_sync)
        if self._lease is not None and not self._lease.swap(self.tenure, new):
            self._depose()
            return False
        self.tenure = new
        return True

    def _look(self, now: float) -> None:
        self._compare()
        self._looked = now

    def _compare(self) -> None:
        if self._lease is not None and self._lease.read() != self.tenure:
            self._depose()

    def _depose(self) -> None:
        found = self._lease.read() if self._lease is not None else None
        whom = f"{found.holder} is, in term {found.term}" if found else "nobody is"
        self.deposed = f"this server is not primary of its shard any more: {whom}"
