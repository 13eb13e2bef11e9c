"""One shard's machines: log entries, replication to a standby, failover, and clipping."""

__all__ = ["clipping", "failover", "replication", "state_machine"]
