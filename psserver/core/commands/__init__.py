"""Commands to the coordinator: checked on arrival, recorded for replay, and queries that change
nothing.
"""

__all__ = [
    "command",
    "data_commands",
    "job_commands",
    "recorded",
    "recorder",
    "request_checks",
    "shard_commands",
    "waiting",
    "worker_commands",
]
