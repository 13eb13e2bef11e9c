"""The servers of a job as shard 0 sees them: which are connected, and which have loaded what
they must.

No lock of its own: the hub's guards it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pscommon.core.errors import MismatchError, TakenError
from pscommon.core.log_entries import Entry, ShardReport
from pscommon.core.model_spec import ModelSpec
from pscommon.snapshot import Manifest
from psproto.v1 import coordinator_pb2 as pb
from psserver.core.job.catch_up import CatchUp, way_for
from psserver.core.job.coordinator import CoordinatorMachine
from psserver.core.shard.state_machine import NO_LOG
from psserver.durability.record_sink import StandbyLink
from psserver.process.shard_count_file import ShardCountFile


class DeliveryCursor(NamedTuple):
    """What a shard has been told over one line: how far the log goes, and the way to come to
    follow it.
    """

    epoch: int = NO_LOG
    reached: int = 0
    catch_up: CatchUp | None = None


class RegistryView(NamedTuple):
    """The job's servers at one moment: as Fleet says. layout: how often their number has
    changed.
    """

    shards: int
    addresses: list[str]
    standbys: list[str]
    layout: int


class ShardUpdate(NamedTuple):
    """What to tell a shard, and how far it has then been told. way: how it comes to follow,
    where it does not yet.

    All of one moment: a way that is told with the servers of the next moment leads astray.
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
    """What the coordinator knows of a shard's process. instance differs at every start of it,
    line at every connect.

    ready: it follows the log of now. way: what it was told to do to come there. recovers: it was
    asked to read its log. logs: it writes a log; log_broken: it could not write some of it.
    leaves: the job has no place for it any more. term: number of failovers of the shard;
    standby: where that is. place: where its PIDs hold (`pscommon.system.process_id`).
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


DOING = {
    CatchUp.RECOVER: "read its log",
    CatchUp.ADOPT: "move in",
    CatchUp.RESTORE: "load snapshot {version}",
}


class ServerRegistry:
    """All servers, by shard; shard 0's is this process. snapshot: the one that the log of now
    goes on from, if any.

    While the model moves to fewer shards, those that are to leave are still here. candidates:
    who could come, by shard and of how many. line: to the standby of shard 0.
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
        """How many the job has, or will have when a move is over."""
        return self.layout.shards

    def picture(self) -> RegistryView:
        return RegistryView(self.shards, self.addresses, self.standbys, self.layout.changes)

    def form(self, members: int) -> None:
        """So many servers follow the log from now on: candidates come in, who is superfluous
        leaves.
        """
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
        """By shard, empty where nobody has come yet; of those that will stay."""
        return [server.address for server in self._servers[: self.shards]]

    @property
    def served(self) -> list[str]:
        """As addresses, empty where nobody is now: workers tell who comes there where shard 0
        is.
        """
        return [
            server.address if server.connected else "" for server in self._servers[: self.shards]
        ]

    @property
    def missing(self) -> str:
        """Whom training has to wait for, in words; empty when all are there and ready."""
        absent = [f"shard {s.shard}" for s in self._servers if not s.connected]
        if absent:
            return f"{', '.join(absent)} of {len(self._servers)} to connect"
        late = [f"shard {s.shard} {self._doing(s)}" for s in self._servers if not s.ready]
        return ", ".join(late)

    def _doing(self, server: ServerEntry) -> str:
        text = DOING.get(server.catch_up, "join") if server.catch_up is not None else "join"
        return "to " + text.format(version=self.snapshot.version if self.snapshot else 0)

    @property
    def standbys(self) -> list[str]:
        """Their addresses by shard, empty where there is none."""
        first = self._standby_link.address if self._standby_link is not None else ""
        return [first, *(server.standby for server in self._servers[1:])]

    @property
    def terms(self) -> list[int]:
        """Of the primaries, by shard."""
        return [server.term for server in self._servers]

    def _place(self, shard: int, shards: int, followed: bool) -> ServerEntry:
        """Whom a process that says that it is shard I of N can be: one of the job, a candidate,
        or one that has missed its end, because it followed the job's log before."""
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
        """A process says that it is primary of a shard. Who it is now, and whether it takes the
        place of another one that was here. MismatchError if it cannot be, TakenError if there is
        one of a higher term."""
        server = self._place(shard, shards, followed)
        if term < server.term:
            text = f"{server.address} is primary of shard {shard}, in term {server.term}; this server was, in {term}"
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
        """Does it follow the job's log?"""
        return server.shard < len(self._servers) and self._servers[server.shard] is server

    def disconnect(self, server: ServerEntry, connection: int) -> bool:
        """A line is cut. That of an earlier connect may be found so long after its successor
        works. True: it is news, nobody serves the shard now."""
        is_lost = server.connection == connection and server.connected
        server.connected = server.connected and not is_lost
        self.candidates = {place: each for place, each in self.candidates.items() if each.connected}
        return is_lost

    def choose_catch_up(
        self, report: ShardReport, coordinator: CoordinatorMachine, durable: bool
    ) -> CatchUp:
        """How the shard that reports comes to follow. durable: shards write logs."""
        server = self._servers[report.shard]
        if report.epoch != coordinator.epoch and server.catch_up in (
            CatchUp.RECOVER,
            CatchUp.RESTORE,
            CatchUp.BEGIN,
            CatchUp.ADOPT,
        ):
            return server.catch_up  # it has not done yet what it was told
        if (
            report.epoch == coordinator.epoch
            and server.ready
            and not coordinator.is_stranded(report)
        ):
            return CatchUp.FOLLOW
        can_recover = durable and not server.is_recovery_requested
        return way_for(
            coordinator,
            report,
            report.epoch == NO_LOG,
            can_recover,
            restores=self.snapshot is not None,
        )

    def new_log(self, snapshot: Manifest | None) -> None:
        """A log that goes on from a snapshot, or from nothing, begins: nobody follows it yet."""
        self.snapshot = snapshot
        for server in self._servers:
            server.ready, server.catch_up = False, None
