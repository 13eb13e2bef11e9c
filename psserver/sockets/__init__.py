"""Stream connections to one server, of workers and other shards: sockets in a few event loops, so
that waiting needs no thread.
"""

__all__ = ["listener", "socket_port"]
