"""Bytes between workers and one shard: receiving pushes, sending weights, and shared-memory
buffers.
"""
