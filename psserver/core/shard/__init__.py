"""One shard's machines: log entries, replication to a standby, failover, and clipping."""
