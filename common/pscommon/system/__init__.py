"""What the operating system offers: shared memory, threads, signals, processes and small files."""

__all__ = [
    "file_limit",
    "imports",
    "local_jobs",
    "malloc",
    "memory_limit",
    "packages",
    "process_id",
    "shared_memory",
    "signals",
    "small_files",
    "thread_team",
    "user_modules",
]
