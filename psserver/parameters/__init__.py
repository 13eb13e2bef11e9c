"""The arrays of one shard: staged gradients, their average, the optimizer update, and reads of
the weights.
"""
