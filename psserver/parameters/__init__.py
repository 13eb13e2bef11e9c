"""The arrays of one shard: staged gradients, averages, updates and weight reads."""

__all__ = [
    "finite_check",
    "frozen_shard",
    "push_groups",
    "staging",
    "store",
    "uploads",
    "weight_reads",
]
