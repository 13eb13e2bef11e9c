"""Environments that engines give to processes: what they say about a server or a worker.

One module for each kind of engine; `detection` has their order.
"""

__all__ = ["detection", "place"]
