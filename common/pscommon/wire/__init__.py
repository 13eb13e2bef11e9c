"""The network on both sides: endpoints, frames of bytes, messages, errors in transit, streams."""

__all__ = [
    "blocking_socket",
    "endpoint",
    "frames",
    "messages",
    "metrics_port",
    "push",
    "ranges",
    "requests",
    "status",
    "stream_format",
    "tls_probe",
    "tls_socket",
]
