"""The arrays of one shard: staged gradients, averages, optimizer steps and weight reads."""

__all__ = [
    "finite_check",
    "frozen_shard",
    "partition",
    "push_groups",
    "staging",
    "store",
    "weight_reads",
]
