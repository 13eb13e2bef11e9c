"""What every part of a server process needs: configuration, identity, metrics, and handlers."""

__all__ = [
    "access",
    "config",
    "generation_file",
    "handlers",
    "identity",
    "job_files",
    "metrics",
    "port_file",
    "worker_exits",
]
