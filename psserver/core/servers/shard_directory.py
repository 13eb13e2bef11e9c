"""The servers of a job as shard 0 sees them: which are connected, and which follow the log.

Theory of operation. A shard's process connects, reports its state, and gets updates. A process
that does not follow the current log is first told how it can (catch_up.py). It follows as soon as
its report belongs to the log; only then does it get entries.

Events: a process connects, reports, finishes a catch-up action, or is disconnected. A new log
begins, or a reshard changes the number of servers.

Invariants:

- A shard has one primary: the newest process of the highest term.
- A cursor says what a connection has transferred. An update holds what the cursor lacks, all of
  one moment.
- A catch-up action is sent once over a connection, and stays in force until it is finished or a
  new log begins.
"""

from collections.abc import Collection, Iterator
from typing import Generic, Protocol, TypeVar

from pscommon.core.errors import MismatchError, TakenError
from pscommon.core.log_entries import ShardReport
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.servers.catch_up import CatchUp, choose_catch_up
from psserver.core.servers.server_entry import (
    Delivery,
    DeliveryCursor,
    ReportDecision,
    ServerEntry,
)
from psserver.core.shard.state_machine import NO_LOG


class ShardCounts(Protocol):
    """The number of shards of the job.

    Attributes:
        shards: Current number; during a reshard: after it.
        changes: How often the number has changed.
        past: Earlier numbers, which command lines may still contain.
    """

    shards: int
    changes: int

    @property
    def past(self) -> Collection[int]: ...


class StandbyView(Protocol):
    """The connection to the standby of shard 0."""

    @property
    def term(self) -> int:
        """Term of shard 0's primary."""
        ...

    @property
    def address(self) -> str:
        """Address of the standby; empty without a standby."""
        ...


class SavedSnapshot(Protocol):
    """A complete snapshot."""

    @property
    def version(self) -> int: ...


SnapshotT = TypeVar("SnapshotT", bound=SavedSnapshot)


CATCH_UP_TEXTS = {
    CatchUp.RECOVER: "read its log",
    CatchUp.ADOPT: "join the reshard",
    CatchUp.RESTORE: "load snapshot {version}",
}


class ShardDirectory(Generic[SnapshotT]):
    """All servers by shard; shard 0's is this process.

    During a reshard to fewer shards, the leaving servers are still here.

    Attributes:
        shard_count: The number of shards.
        snapshot: The snapshot that the current log continues from; None without one.
        candidates: Servers that wait for a reshard, by shard and number of shards.

    Args:
        standby_link: Connection to the standby of shard 0.
    """

    def __init__(
        self, shard_count: ShardCounts, address: str, standby_link: StandbyView | None = None
    ) -> None:
        self.snapshot: SnapshotT | None = None
        self.shard_count = shard_count
        self.candidates: dict[tuple[int, int], ServerEntry] = {}
        self._standby_link = standby_link
        self._servers = [ServerEntry(shard) for shard in range(shard_count.shards)]
        self._servers[0].address, self._servers[0].connected = address, True
        self._servers[0].term = standby_link.term if standby_link is not None else 1

    @property
    def shards(self) -> int:
        """Number of shards of the job; during a reshard: after it."""
        return self.shard_count.shards

    def form(self, members: int) -> None:
        """Set how many servers follow the log: candidates join, superfluous servers leave."""
        for shard in range(len(self._servers), members):
            self._servers.append(self.candidates.pop((shard, members), ServerEntry(shard)))
        for server in self._servers[members:]:
            server.is_leaving = True
        del self._servers[members:]

    def __iter__(self) -> Iterator[ServerEntry]:
        return iter(self._servers)

    def __getitem__(self, shard: int) -> ServerEntry:
        return self._servers[shard]

    @property
    def addresses(self) -> list[str]:
        """Addresses by shard; empty where none has connected. Leaving servers are excluded."""
        return [server.address for server in self._servers[: self.shards]]

    @property
    def served(self) -> list[str]:
        """Addresses by shard; empty where no server is connected now.

        Workers tell a server that appears there where shard 0 is.
        """
        return [
            server.address if server.connected else "" for server in self._servers[: self.shards]
        ]

    @property
    def missing(self) -> str:
        """The servers that training waits for, in words; empty if all are ready."""
        absent = [f"shard {s.shard}" for s in self._servers if not s.connected]
        if absent:
            return f"{', '.join(absent)} of {len(self._servers)} to connect"
        late = [f"shard {s.shard} {self._doing(s)}" for s in self._servers if not s.ready]
        return ", ".join(late)

    def _doing(self, server: ServerEntry) -> str:
        text = (
            CATCH_UP_TEXTS.get(server.catch_up, "join") if server.catch_up is not None else "join"
        )
        return "to " + text.format(version=self.snapshot.version if self.snapshot else 0)

    @property
    def standbys(self) -> list[str]:
        """Addresses of the standbys by shard; empty where there is none."""
        first = self._standby_link.address if self._standby_link is not None else ""
        return [first, *(server.standby for server in self._servers[1:])]

    @property
    def terms(self) -> list[int]:
        """Terms of the primaries, by shard."""
        return [server.term for server in self._servers]

    def _place(self, shard: int, shards: int, followed: bool) -> ServerEntry:
        """Return the entry for a process that claims to be shard I of N.

        It is a member, a candidate, or a former member: a process that followed the job's log and
        missed the end of its membership.
        """
        known = shards == self.shards or shards in self.shard_count.past
        if known and 0 < shard < len(self._servers):
            return self._servers[shard]
        if known and followed:
            return ServerEntry(shard, is_leaving=True)
        if self.shards <= shard < shards:
            return self.candidates.setdefault((shard, shards), ServerEntry(shard))
        text = f"shard {shard}/{shards} does not belong to this job of {self.shards} shards"
        raise MismatchError(text, "SHARD_MISMATCH")

    def connect(
        self,
        shard: int,
        shards: int,
        address: str,
        instance: str,
        followed: bool = False,
        term: int = 1,
    ) -> tuple[ServerEntry, bool]:
        """Register a process that claims to be the primary of a shard.

        Returns:
            Its entry, and whether it replaces another process.

        Raises:
            MismatchError: The shard does not belong to the job, or another process serves it.
            TakenError: There is a primary of a higher term.
        """
        server = self._place(shard, shards, followed)
        if term < server.term:
            text = (
                f"this server is no longer primary of shard {shard}: {server.address} is, in term "
                f"{server.term} (this server: term {term})"
            )
            raise TakenError(text, "DEPOSED")
        if server.connected and server.instance != instance and term == server.term:
            raise MismatchError(
                f"shard {shard} is already served by {server.address}", "SHARD_TAKEN"
            )
        replaces = term > server.term or (bool(server.instance) and server.instance != instance)
        server.is_recovery_requested = server.is_recovery_requested and server.instance == instance
        server.address, server.instance, server.connected = address, instance, True
        server.ready, server.catch_up = False, None
        server.term = term
        server.connection += 1
        return server, replaces

    def is_current(
        self, server: ServerEntry, connection: int | None, coordinator: CoordinatorMachine
    ) -> bool:
        """Return whether the server is a member and the connection is its current one.

        Candidates, leaving servers, replaced servers and old connections are excluded.
        """
        return (
            connection in (None, server.connection)
            and self.is_member(server)
            and server.shard < coordinator.job.following_shards
        )

    def release_leavers(self, coordinator: CoordinatorMachine) -> bool:
        """Release the servers that a finished reshard has removed. Return whether there are any."""
        members = coordinator.job.following_shards
        has_leavers = len(self._servers) > members
        if has_leavers:
            self.form(members)
        return has_leavers

    def is_member(self, server: ServerEntry) -> bool:
        """Return whether the server follows the job's log."""
        return server.shard < len(self._servers) and self._servers[server.shard] is server

    def disconnect(self, server: ServerEntry, connection: int) -> bool:
        """Record that a connection ended; return whether the shard has lost its only connection.

        The end of an old connection may be noticed after a newer one works.
        """
        is_lost = server.connection == connection and server.connected
        server.connected = server.connected and not is_lost
        self.candidates = {place: each for place, each in self.candidates.items() if each.connected}
        return is_lost

    def record_report(
        self,
        server: ServerEntry,
        report: ShardReport,
        coordinator: CoordinatorMachine,
        has_logs: bool,
    ) -> ReportDecision:
        """Record a member's report, and choose what it must do to follow the log.

        Args:
            has_logs: Shards write logs.
        """
        catch_up = self._choose_catch_up(report, coordinator, has_logs)
        follows = catch_up is CatchUp.FOLLOW
        is_change = catch_up is not server.catch_up or server.ready is not follows
        server.ready, server.catch_up = follows, catch_up
        server.is_recovery_requested = server.is_recovery_requested or catch_up is CatchUp.RECOVER
        server.logs, server.log_broken = report.log_bytes > 0, report.log_broken
        return ReportDecision(catch_up, is_change)

    def end_catch_up(self, server: ServerEntry) -> CatchUp | None:
        """Record that a member has finished its catch-up action, or failed. Return the action."""
        action, server.catch_up = server.catch_up, None
        return action

    def next_delivery(
        self, server: ServerEntry, cursor: DeliveryCursor, coordinator: CoordinatorMachine
    ) -> Delivery | None:
        """Return what a server has not received yet; None if it is no member."""
        if not self.is_member(server):
            return None
        index = cursor.reached if cursor.log_id == coordinator.job.log_id else coordinator.log.base
        entries = coordinator.log.after(index) if server.ready else []
        reached = max(index, coordinator.log.index) if server.ready else index
        is_new = (cursor.log_id, cursor.catch_up) != (coordinator.job.log_id, server.catch_up)
        catch_up = (server.catch_up or CatchUp.FOLLOW) if is_new else CatchUp.FOLLOW
        return Delivery(
            DeliveryCursor(coordinator.job.log_id, reached, server.catch_up), catch_up, entries
        )

    def _choose_catch_up(
        self, report: ShardReport, coordinator: CoordinatorMachine, has_logs: bool
    ) -> CatchUp:
        server, is_on_log = self._servers[report.shard], report.log_id == coordinator.job.log_id
        if not is_on_log and server.catch_up in (
            CatchUp.RECOVER,
            CatchUp.RESTORE,
            CatchUp.BEGIN,
            CatchUp.ADOPT,
        ):
            return server.catch_up  # the action is not done yet
        is_stranded = report.is_resharding and coordinator.resharding.is_stranded(report)
        if is_on_log and server.ready and not is_stranded:
            return CatchUp.FOLLOW
        can_recover = has_logs and not server.is_recovery_requested
        return choose_catch_up(
            coordinator,
            report,
            report.log_id == NO_LOG,
            can_recover,
            restores=self.snapshot is not None,
        )

    def new_log(self, snapshot: SnapshotT | None) -> None:
        """Record that a new log starts from a snapshot or empty: no server follows it yet."""
        self.snapshot = snapshot
        for server in self._servers:
            server.ready, server.catch_up = False, None
