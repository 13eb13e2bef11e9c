"""The arrays of one shard: staged gradients, averages, optimizer steps and weight reads."""

__all__ = [
    "frozen_shard",
    "partition",
    "push_groups",
    "staging",
    "store",
    "weight_reads",
]
