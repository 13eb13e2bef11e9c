"""The servers of a job as shard 0 sees them: which are connected, and which have loaded what they must.

No lock of its own: the hub's guards it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pscommon.core.errors import MismatchError
from pscommon.core.log import Entry, Report
from pscommon.core.model import ModelSpec
from pscommon.snapshot import Manifest
from psserver.core.coordinator import Coordinator
from psserver.core.following import Way, way_for
from psserver.core.shard import NO_LOG


class Told(NamedTuple):
    """What a shard has been told over one line: how far the log goes, and the way to come to follow it."""

    epoch: int = NO_LOG
    reached: int = 0
    way: Way | None = None


class News(NamedTuple):
    """What to tell a shard, and how far it has then been told. way: how it comes to follow, where it does not yet."""

    told: Told
    base: int
    model: ModelSpec | None
    way: Way
    snapshot: Manifest | None
    entries: list[Entry]
    snapshots: list[int]


@dataclass(slots=True)
class Server:
    """What the coordinator knows of a shard's process. instance differs at every start of it, line at every connect.

    ready: it follows the log of now. way: what it was told to do to come there. recovers: it was asked to read its log.
    log_broken: it could not write some of it.
    """

    shard: int
    address: str = ""
    instance: str = ""
    connected: bool = False
    line: int = 0
    ready: bool = False
    way: Way | None = None
    recovers: bool = False
    log_broken: bool = False
    stats: dict[str, Any] = field(default_factory=dict)


DOING = {Way.RECOVER: "read its log", Way.RESTORE: "load snapshot {version}"}


class Fleet:
    """All servers, by shard; shard 0's is this process. snapshot: the one that the log of now goes on from, if any."""

    def __init__(self, shards: int, address: str) -> None:
        self.snapshot: Manifest | None = None
        self._servers = [Server(shard) for shard in range(shards)]
        self._servers[0].address, self._servers[0].connected = address, True

    def __iter__(self) -> Iterator[Server]:
        return iter(self._servers)

    def __getitem__(self, shard: int) -> Server:
        return self._servers[shard]

    @property
    def addresses(self) -> list[str]:
        """By shard, empty where nobody has come yet."""
        return [server.address for server in self._servers]

    @property
    def missing(self) -> str:
        """Whom training has to wait for, in words; empty when all are there and ready."""
        absent = [f"shard {s.shard}" for s in self._servers if not s.connected]
        if absent:
            return f"{', '.join(absent)} of {len(self._servers)} to connect"
        late = [f"shard {s.shard} {self._doing(s)}" for s in self._servers if not s.ready]
        return ", ".join(late)

    def _doing(self, server: Server) -> str:
        text = DOING.get(server.way, "join") if server.way is not None else "join"
        return "to " + text.format(version=self.snapshot.version if self.snapshot else 0)

    def connect(self, shard: int, shards: int, address: str, instance: str) -> bool:
        """A process says that it is a shard. True: it replaces one that was lost. MismatchError if it cannot be."""
        if shards != len(self._servers) or not 0 < shard < shards:
            text = f"shard {shard}/{shards} does not belong to this job of {len(self._servers)} shards"
            raise MismatchError(text, "SHARD_MISMATCH")
        server = self._servers[shard]
        if server.connected and server.instance != instance:
            raise MismatchError(f"shard {shard} is already served by {server.address}", "SHARD_TAKEN")
        reborn = bool(server.instance) and server.instance != instance
        server.recovers = server.recovers and server.instance == instance
        server.address, server.instance, server.connected = address, instance, True
        server.ready, server.way = False, None
        server.line += 1
        return reborn

    def disconnect(self, shard: int, line: int) -> bool:
        """A line is cut. That of an earlier connect may be found so long after its successor works. True: it is news,
        nobody serves the shard now."""
        server = self._servers[shard]
        news = server.line == line and server.connected
        server.connected = server.connected and not news
        return news

    def way(self, report: Report, coordinator: Coordinator, durable: bool) -> Way:
        """How the shard that reports comes to follow. durable: shards write logs."""
        server = self._servers[report.shard]
        if report.epoch != coordinator.epoch and server.way in (Way.RECOVER, Way.RESTORE, Way.BEGIN):
            return server.way  # it has not done yet what it was told
        if report.epoch == coordinator.epoch and server.ready:
            return Way.FOLLOW
        can_recover = durable and not server.recovers
        return way_for(coordinator, report, report.epoch == NO_LOG, can_recover, restores=self.snapshot is not None)

    def new_log(self, snapshot: Manifest | None) -> None:
        """A log that goes on from a snapshot, or from nothing, begins: nobody follows it yet."""
        self.snapshot = snapshot
        for server in self._servers:
            server.ready, server.way = False, None
