"""The framework-free client for numpy arrays, and a client without servers."""

__all__ = ["client", "local_client"]
