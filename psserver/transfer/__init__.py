"""Transfer of tensors between workers and one shard: receive pushes, send weights."""

__all__ = ["exchange_steps", "pull_sender", "push_receiver", "servicer"]
