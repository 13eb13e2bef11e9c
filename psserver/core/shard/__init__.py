"""One shard's machines: executing log entries, replication to a standby, failover, and clipping."""
