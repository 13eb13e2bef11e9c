"""The network on both sides: endpoints, frames of bytes, messages, errors in transit, streams."""

__all__ = [
    "blocking_socket",
    "endpoint",
    "frames",
    "messages",
    "metrics_port",
    "push",
    "requests",
    "status",
    "stream_format",
]
