"""Connections of workers and other shards to one server: sockets in a few event loops, so that
waiting needs no thread.
"""

__all__ = ["listener", "socket_port"]
