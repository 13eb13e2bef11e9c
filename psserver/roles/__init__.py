"""Builds a server's parts, one builder for each role."""

__all__ = ["coordinator", "primary", "shard", "standby"]
