"""Reports of shards that follow the log of a coordinator."""

from types import SimpleNamespace

from pscommon.core.log_entries import ShardReport
from psserver.core.commands.recorder import Recorder
from psserver.core.servers.shard_directory import SavedSnapshot, ShardDirectory
from psserver.core.servers.shard_protocol import process_report


def report_to(recorder: Recorder, report: ShardReport, now: float) -> None:
    """Process the report of a shard that is known to follow the log.

    A report on another log, or of a shard that a reshard has removed, is ignored.
    """
    job = recorder.coordinator.job
    if report.log_id == job.log_id and report.shard < job.following_shards:
        counts = SimpleNamespace(shards=job.following_shards, changes=0, past=())
        directory = ShardDirectory[SavedSnapshot](counts, "shard 0")
        directory[report.shard].ready = True
        process_report(
            recorder, directory, directory[report.shard], None, report, now, has_logs=False
        )
