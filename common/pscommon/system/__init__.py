"""What the operating system offers: shared memory, threads, signals, processes and small files."""

__all__ = [
    "event_files",
    "imports",
    "local_jobs",
    "process_id",
    "process_limits",
    "shared_memory",
    "signals",
    "small_files",
    "thread_team",
]
