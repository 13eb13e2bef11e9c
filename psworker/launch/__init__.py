"""Starting, watching and restarting processes on this machine, and running a training script."""

__all__ = [
    "actions",
    "orphan_guard",
    "outcome",
    "plan",
    "preload",
    "processes",
    "script",
    "supervisor",
    "temporary_folder",
]
