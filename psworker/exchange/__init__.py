"""Push and pull over all shards: one transfer per shard and their combined result."""

__all__ = ["model_exchange", "open_push", "reduce_client", "transfer"]
