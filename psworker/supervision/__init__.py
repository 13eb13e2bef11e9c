"""Starting, watching and restarting processes on this machine, and running a training script."""

__all__ = [
    "decisions",
    "orphan_guard",
    "plan",
    "processes",
    "script",
    "supervisor",
]
