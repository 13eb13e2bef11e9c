"""One shard at work: the engine that applies log entries, its link to the coordinator, and
resharding.
"""
