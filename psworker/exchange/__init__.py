"""Push and pull over all shards: splitting buffers, one transfer per shard, and their combined
result.
"""
