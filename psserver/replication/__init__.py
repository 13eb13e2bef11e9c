"""Primary and standby of one shard: replication of records, failover, and the primary lease."""
