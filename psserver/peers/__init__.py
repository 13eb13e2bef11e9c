"""Connections between servers: a shard's link to the coordinator, and partitions and weights that
servers read from each other.
"""

__all__ = ["coordinator_link", "final_weights", "link_messages", "peer_handlers", "resharding"]
