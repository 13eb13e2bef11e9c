"""Push and pull over all shards: one transfer per shard and their combined result."""

__all__ = ["buffered_push", "model_exchange", "open_push", "scattered_buffer"]
