"""Primary and standby of one shard: replication of records, failover, and the primary lease."""

__all__ = ["hello", "lease_directory", "primary", "servicer", "standby", "standby_state"]
