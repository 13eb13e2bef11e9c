"""The coordinator on shard 0: executes commands, keeps the directory of shards, answers workers
and shards.

It drives the pure machines of `psserver.core` and owns no training data itself.
"""

__all__ = ["final_state", "handlers", "service", "shard_stream", "status"]
