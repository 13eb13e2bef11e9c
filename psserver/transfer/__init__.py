"""Transfer of tensors between workers and one shard: receive pushes, send weights."""

__all__ = ["servicer"]
