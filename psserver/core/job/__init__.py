"""The state of a job: settings, policy, log of entries, pending pushes, snapshots."""

__all__ = [
    "clipping",
    "entry_log",
    "job_state",
    "pending_pushes",
    "policy",
    "ready_pushes",
    "reduction",
    "reshard_phase",
    "settings",
    "snapshot_schedule",
    "trainings",
    "worker_scaling",
]
