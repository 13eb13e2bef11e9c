"""What the operating system offers: shared memory, threads, signals, processes and small files."""
