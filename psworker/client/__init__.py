"""The framework-free client: numpy arrays in, numpy arrays out, and the same without servers."""

__all__ = ["client", "local_client"]
