"""The servers of a job as shard 0 sees them: which are connected, and which follow the log.

The executor's lock guards it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pscommon.core.errors import MismatchError, TakenError
from pscommon.core.log_entries import Entry, ShardReport
from pscommon.core.model_spec import ModelSpec
from pscommon.snapshot import Manifest
from psproto.v1 import coordinator_pb2 as pb
from psserver.core.job.catch_up import CatchUp, choose_catch_up
from psserver.core.job.coordinator import CoordinatorMachine
from psserver.core.shard.state_machine import NO_LOG
from psserver.durability.record_sink import StandbyLink
from psserver.process.shard_count_file import ShardCountFile


class DeliveryCursor(NamedTuple):
    """What a shard has received over one connection.

    Attributes:
        epoch: Id of the log.
        reached: Index of the last log entry that was sent.
        catch_up: The last catch-up action that was sent.
    """

    epoch: int = NO_LOG
    reached: int = 0
    catch_up: CatchUp | None = None


class RegistryView(NamedTuple):
    """The job's servers at one moment.

    Attributes:
        shards: Number of shards.
        addresses: Primaries by shard; empty where none has connected.
        standbys: Standbys by shard; empty where there is none.
        layout: How often the number of shards has changed.
    """

    shards: int
    addresses: list[str]
    standbys: list[str]
    layout: int


class ShardUpdate(NamedTuple):
    """What to send to a shard, and the cursor after it.

    All fields are of the same moment: an action combined with a later list of servers would be
    wrong.

    Attributes:
        base: Index of the log entry at which the log starts.
        catch_up: What the shard must do before it can follow the log.
        snapshots: Versions of the snapshots that are kept.
        move: The reshard in progress; None without one.
    """

    cursor: DeliveryCursor
    base: int
    model: ModelSpec | None
    catch_up: CatchUp
    snapshot: Manifest | None
    entries: list[Entry]
    snapshots: list[int]
    registry: RegistryView
    move: pb.Move | None


@dataclass(slots=True)
class ServerEntry:
    """What the coordinator knows of a shard's process.

    Attributes:
        instance: Differs at every start of the process.
        connection: Number of the current connection; increases at every connect.
        ready: The process follows the current log.
        catch_up: The action that it was asked to take in order to follow the log.
        is_recovery_requested: The process was asked to read its write-ahead log.
        logs: The process writes a write-ahead log.
        log_broken: The process could not write part of its log.
        is_leaving: The job no longer needs the process.
        term: Number of failovers of the shard.
        standby: Address of its standby; empty without one.
        place: Namespace in which its PIDs are valid (`pscommon.system.process_id`).
        stats: The statistics that it reported last.
    """

    shard: int
    address: str = ""
    instance: str = ""
    connected: bool = False
    connection: int = 0
    ready: bool = False
    catch_up: CatchUp | None = None
    is_recovery_requested: bool = False
    logs: bool = False
    log_broken: bool = False
    is_leaving: bool = False
    term: int = 1
    standby: str = ""
    place: str = ""
    stats: dict[str, Any] = field(default_factory=dict)


CATCH_UP_TEXTS = {
    CatchUp.RECOVER: "read its log",
    CatchUp.ADOPT: "move in",
    CatchUp.RESTORE: "load snapshot {version}",
}


class ServerRegistry:
    """All servers by shard; shard 0's is this process.

    While the model moves to fewer shards, the leaving servers are still here.

    Attributes:
        snapshot: The snapshot that the current log continues from; None without one.
        candidates: Servers that wait for a reshard, by shard and number of shards.

    Args:
        standby_link: Connection to the standby of shard 0.
    """

    def __init__(
        self, layout: ShardCountFile, address: str, standby_link: StandbyLink | None = None
    ) -> None:
        self.snapshot: Manifest | None = None
        self.layout = layout
        self.candidates: dict[tuple[int, int], ServerEntry] = {}
        self._standby_link = standby_link
        self._servers = [ServerEntry(shard) for shard in range(layout.shards)]
        self._servers[0].address, self._servers[0].connected = address, True
        self._servers[0].term = standby_link.term if standby_link is not None else 1

    @property
    def shards(self) -> int:
        """Number of shards of the job; during a reshard: after it."""
        return self.layout.shards

    def picture(self) -> RegistryView:
        return RegistryView(self.shards, self.addresses, self.standbys, self.layout.changes)

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
        known = shards == self.shards or shards in self.layout.past
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
                f"{server.address} is primary of shard {shard}, in term {server.term}; "
                f"this server was, in {term}"
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

    def choose_catch_up(
        self, report: ShardReport, coordinator: CoordinatorMachine, durable: bool
    ) -> CatchUp:
        """Choose what the reporting shard must do to follow the log.

        Args:
            durable: Shards write logs.
        """
        server = self._servers[report.shard]
        if report.epoch != coordinator.epoch and server.catch_up in (
            CatchUp.RECOVER,
            CatchUp.RESTORE,
            CatchUp.BEGIN,
            CatchUp.ADOPT,
        ):
            return server.catch_up  # the action is not done yet
        if (
            report.epoch == coordinator.epoch
            and server.ready
            and not coordinator.is_stranded(report)
        ):
            return CatchUp.FOLLOW
        can_recover = durable and not server.is_recovery_requested
        return choose_catch_up(
            coordinator,
            report,
            report.epoch == NO_LOG,
            can_recover,
            restores=self.snapshot is not None,
        )

    def new_log(self, snapshot: Manifest | None) -> None:
        """Record that a new log starts from a snapshot or empty: no server follows it yet."""
        self.snapshot = snapshot
        for server in self._servers:
            server.ready, server.catch_up = False, None
