"""The write-ahead log on disk: record format, segment files, and the log made of them."""

__all__ = ["format", "log"]
