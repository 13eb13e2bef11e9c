"""Commands to the coordinator: checked on arrival, recorded for replay, and queries that change
nothing.
"""

__all__ = ["recorder", "request_checks", "waiting", "worker_share"]
