"""The coordinator's decisions: update rounds, policies, snapshots, resharding, and the log of
entries.
"""

__all__ = [
    "admission",
    "catch_up",
    "coordinator",
    "entry_log",
    "pending_pushes",
    "policy",
    "settings",
    "snapshot_schedule",
]
