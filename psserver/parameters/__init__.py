"""The arrays of one shard: staged gradients, averages, updates and weight reads."""

__all__ = [
    "frozen_shard",
    "push_groups",
    "staging",
    "store",
    "weight_reads",
]
