"""Exchanges between workers and one shard: receive a push, wait for its decision, send weights."""

__all__ = ["exchange", "handlers", "push_receiver"]
