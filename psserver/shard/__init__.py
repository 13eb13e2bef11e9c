"""One running shard: the engine that applies log entries, and the workers' traffic with it."""

__all__ = ["engine", "live_state", "observers", "worker_traffic"]
