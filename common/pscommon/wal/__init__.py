"""The write-ahead log on disk: record format, segment files, and the log itself."""

__all__ = ["format", "log"]
