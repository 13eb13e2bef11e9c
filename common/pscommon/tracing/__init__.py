"""Spans: the timed phases of a step, how processes record them, and how they travel."""

__all__ = ["batch", "clock_offset", "recorder", "spans"]
