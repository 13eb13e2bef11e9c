"""State that survives a process: write-ahead logs, recovery from them, and snapshots."""

__all__ = [
    "best_effort_log",
    "coordinator_log",
    "data_formats",
    "record_sink",
    "shard_log",
    "shard_recovery",
    "shard_state",
    "snapshots",
    "state_records",
]
