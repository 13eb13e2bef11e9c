"""The network on both sides: endpoints, frames of bytes, messages, errors in transit, streams."""

__all__ = [
    "blocking_socket",
    "endpoint",
    "frames",
    "messages",
    "push",
    "ranges",
    "requests",
    "status",
    "stream_format",
]
