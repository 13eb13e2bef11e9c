"""Starting, watching and restarting processes on this machine, and running a training script."""

__all__ = [
    "actions",
    "orphan_guard",
    "outcome",
    "plan",
    "processes",
    "script",
    "supervisor",
]
