"""What shard 0 knows of a server, what the server has received, and what it must do next."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pscommon.core.log_entries import Entry
from psserver.core.servers.catch_up import CatchUp
from psserver.core.shard.state_machine import NO_LOG


class DeliveryCursor(NamedTuple):
    """What a shard has received over one connection.

    Attributes:
        log_id: Id of the log.
        reached: Index of the last log entry that was sent.
        catch_up: The last catch-up action that was sent.
    """

    log_id: int = NO_LOG
    reached: int = 0
    catch_up: CatchUp | None = None


class Delivery(NamedTuple):
    """What a shard has not received yet.

    Attributes:
        cursor: The cursor after it.
        catch_up: What the shard must do before it can follow the log.
        entries: New entries of the log.
    """

    cursor: DeliveryCursor
    catch_up: CatchUp
    entries: list[Entry]


class ReportDecision(NamedTuple):
    """What follows from a shard's report.

    Attributes:
        catch_up: What the shard must do; FOLLOW: the machine processes the report; None: it is no
            member.
        is_change: Whether this differs from the decision before, or a reshard has got ahead.
    """

    catch_up: CatchUp | None
    is_change: bool


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
