"""What every part of a server process needs: configuration, identity, metrics, and handlers."""

__all__ = [
    "config",
    "generation_file",
    "handlers",
    "identity",
    "job_id_file",
    "metrics",
    "port_file",
    "shard_count_file",
    "trainings_file",
    "worker_exits",
]
