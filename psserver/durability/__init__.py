"""State that survives a process: write-ahead logs, recovery from them, and snapshots."""
