"""The network on both sides: endpoints, frames of bytes, messages, errors in transit, streams."""

__all__ = ["blocking_stream", "endpoint", "frames", "messages", "push", "status", "stream_format"]
