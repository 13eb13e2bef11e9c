"""The gRPC transport on both sides: channel settings, frames of bytes, messages, errors in
transit.
"""

__all__ = ["channel", "frames", "messages", "status"]
