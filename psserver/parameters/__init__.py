"""The arrays of one shard: staged gradients, averages, optimizer steps and weight reads."""

__all__ = [
    "frozen_shard",
    "gradient_check",
    "memory_budget",
    "partition",
    "staging",
    "store",
    "weight_reads",
]
