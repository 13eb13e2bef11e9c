"""One running shard: the engine that applies log entries, its link to the coordinator, resharding,
and the workers' shared-memory buffers.
"""

__all__ = [
    "coordinator_link",
    "engine",
    "final_weights",
    "peer_servicer",
    "resharding",
    "worker_traffic",
]
