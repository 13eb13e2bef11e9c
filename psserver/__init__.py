"""The parameter server: one shard of the weights, and on shard 0 the coordinator."""
