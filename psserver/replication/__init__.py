"""Primary and standby of one shard: replication of records, failover, and the primary lease."""

__all__ = ["handlers", "hello", "lease_directory", "primary", "standby", "standby_state"]
