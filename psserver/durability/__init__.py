"""What survives the end of a process: write-ahead logs, recovery from them, and snapshots."""
