"""ps-ctl: inspects and controls a running job and its snapshots."""

__all__ = ["output"]
