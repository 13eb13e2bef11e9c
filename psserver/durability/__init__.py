"""State that survives a process: write-ahead logs, recovery from them, and snapshots."""

__all__ = [
    "coordinator_log",
    "data_formats",
    "job_recovery",
    "record_sink",
    "shard_log",
    "shard_recovery",
    "shard_state",
    "snapshots",
    "state_records",
]
