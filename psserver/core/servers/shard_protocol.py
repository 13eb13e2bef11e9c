"""What follows when a shard connects or reports, a snapshot is complete, or a reshard begins.

The shell and the simulation call these functions; the caller holds the lock of the recorder.
"""

from collections.abc import Callable
from dataclasses import replace

from pscommon.core.log_entries import ShardReport
from psserver.core.commands.job_commands import FinishSnapshot
from psserver.core.commands.recorder import Recorder
from psserver.core.commands.request_checks import unfit_pushes
from psserver.core.commands.shard_commands import (
    AddFollower,
    DropShardReports,
    FinishReshard,
    ProcessReport,
    RecordLoadedShard,
    RefusePush,
    RestartShard,
    StartReshard,
)
from psserver.core.coordinator.admission import is_full
from psserver.core.servers.catch_up import CatchUp
from psserver.core.servers.server_entry import ReportDecision, ServerEntry
from psserver.core.servers.shard_directory import ShardDirectory, SnapshotT

NO_MEMBER = ReportDecision(None, is_change=False)


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
) -> ReportDecision:
    """Process a shard's report. One without news is not written: it decides nothing.

    Args:
        connection: The connection over which the report came; None: within this process.
        has_logs: Shards write logs.
    """
    coordinator, job, shard = recorder.coordinator, recorder.coordinator.job, report.shard
    if not directory.is_current(server, connection, coordinator):
        return NO_MEMBER
    decision = directory.record_report(server, report, coordinator, has_logs)
    if decision.catch_up is not CatchUp.FOLLOW:
        if decision.catch_up is CatchUp.BEGIN and decision.is_change:
            recorder.do(DropShardReports(shard), now)
        elif decision.catch_up is CatchUp.ADOPT and decision.is_change:
            # if the coordinator was restarted too, no lost connection has shown it the restart
            recorder.do(RestartShard(shard), now)
        return decision
    if shard not in job.followers:
        recorder.do(AddFollower(shard), now)
    if job.reshard is not None and coordinator.resharding.has_loaded_partition(report):
        recorder.do(RecordLoadedShard(shard), now)
        recorder.end_reshard(now)
        decision = decision._replace(is_change=True)
    news = coordinator.reports.new_pushes(report) if report.staged else []
    unfit = unfit_pushes(coordinator, news) if news else {}
    if unfit:
        staged = tuple(each for each in report.staged if each.key not in unfit)
        report = replace(report, staged=staged)
    # else it is reported again
    for key, why in unfit.items() if job.reshard is None else ():
        recorder.do(RefusePush(key.worker, key.seq, why.reason, why.detail), now)
    has_measured = report.measured is not None and coordinator.reports.has_measured(report)
    if len(news) > len(unfit) or has_measured:
        recorder.do(ProcessReport(report), now)
    else:
        job.log.reached(shard, report.index)
    if is_full(coordinator, report.log_bytes):
        recorder.cut(now)
    return decision


def finish_snapshot(recorder: Recorder, now: float, is_written: bool, has_logs: bool) -> None:
    """Record that the finished snapshot's manifest is written, or failed.

    It ends a reshard. If it failed, the reshard ends without logs only: the previous snapshot is
    then enough. With logs a new segment needs a snapshot, so another one is tried.
    """
    recorder.do(FinishSnapshot(), now)
    if recorder.coordinator.job.reshard is not None and (is_written or not has_logs):
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
