"""The arrays of one shard: staged gradients, averages, optimizer steps and weight reads."""
