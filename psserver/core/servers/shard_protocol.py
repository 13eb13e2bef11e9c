"""What follows when a shard connects or reports, a snapshot is complete, or a reshard begins.

The shell and the simulation call these functions; the caller holds the lock of the recorder.
"""

from collections.abc import Callable

from pscommon.core.log_entries import ShardReport
from psserver.core.commands.job_commands import FinishSnapshot
from psserver.core.commands.recorder import Recorder
from psserver.core.commands.shard_commands import (
    DropShardReports,
    FinishReshard,
    RestartShard,
    StartReshard,
)
from psserver.core.coordinator.admission import is_full
from psserver.core.servers.catch_up import CatchUp
from psserver.core.servers.server_entry import ServerEntry
from psserver.core.servers.shard_directory import ShardDirectory, SnapshotT


def replace_process(
    recorder: Recorder, directory: ShardDirectory[SnapshotT], server: ServerEntry, now: float
) -> bool:
    """Record that a new process serves a member's shard. Return whether it is after a failover.

    After a failover its predecessor may have reported more than it has. The disks then lack state
    that the shard needs, so a snapshot is due.
    """
    if not directory.is_member(server):
        return False
    recorder.do(RestartShard(server.shard), now)
    if server.term > 1:
        recorder.do(DropShardReports(server.shard), now)
    return server.term > 1


def process_report(
    recorder: Recorder,
    directory: ShardDirectory[SnapshotT],
    server: ServerEntry,
    connection: int | None,
    report: ShardReport,
    now: float,
    has_logs: bool,
) -> CatchUp | None:
    """Process a shard's report. Return what the shard must do; None if it is no member.

    Args:
        connection: The connection over which the report came; None: within this process.
        has_logs: Shards write logs.
    """
    if not directory.is_current(server, connection, recorder.coordinator):
        return None
    decision = directory.record_report(server, report, recorder.coordinator, has_logs)
    if decision.catch_up is CatchUp.FOLLOW:
        recorder.report(report, now)
        if is_full(recorder.coordinator, report.log_bytes):
            recorder.cut(now)
    elif decision.catch_up is CatchUp.BEGIN and decision.is_change:
        recorder.do(DropShardReports(report.shard), now)
    elif decision.catch_up is CatchUp.ADOPT and decision.is_change:
        # if the coordinator was restarted too, no lost connection has shown it the restart
        recorder.do(RestartShard(report.shard), now)
    return decision.catch_up


def finish_snapshot(recorder: Recorder, now: float, is_written: bool, has_logs: bool) -> None:
    """Record that the finished snapshot's manifest is written, or failed.

    It ends a reshard. If it failed, the reshard ends without logs only: the previous snapshot is
    then enough. With logs a new segment needs a snapshot, so another one is tried.
    """
    recorder.do(FinishSnapshot(), now)
    if recorder.coordinator.reshard is not None and (is_written or not has_logs):
        recorder.do(FinishReshard(), now)


def start_reshard(
    recorder: Recorder,
    directory: ShardDirectory[SnapshotT],
    shards: int,
    writes_snapshot: bool,
    store_count: Callable[[int], None],
    now: float,
) -> bool:
    """Start a reshard if all servers follow the log and nothing else is in progress.

    Args:
        store_count: Stores the number of shards. It is called first: a server that restarts must
            find the new number.
    """
    if directory.missing or not recorder.coordinator.resharding.can_start(shards):
        return False
    store_count(shards)
    recorder.do(StartReshard(shards, writes_snapshot), now)
    directory.form(recorder.coordinator.job.following_shards)
    return True
