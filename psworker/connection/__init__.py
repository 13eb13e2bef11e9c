"""A worker's connection to a job: discovery, membership with heartbeats, and retries."""

__all__ = [
    "client_facts",
    "connection",
    "discovery",
    "finalizer",
    "membership",
    "retry",
]
