"""The network on both sides: channel settings, frames of bytes, messages, errors in transit,
and streams.
"""

__all__ = [
    "blocking_socket",
    "channel",
    "frames",
    "messages",
    "push",
    "requests",
    "status",
    "stream_format",
]
