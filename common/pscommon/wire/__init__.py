"""gRPC as both sides use it: channel settings, errors in transit, frames of bytes, messages and values."""
