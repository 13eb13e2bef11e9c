"""A worker's connection to a job: discovery, membership with heartbeats, and retries."""

__all__ = ["connection", "discovery", "membership", "retry"]
