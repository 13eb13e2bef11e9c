"""What operators see of a running job: progress, slow or lost workers, and why a job waits."""

__all__ = [
    "live_page",
    "pass_progress",
    "step_export",
    "tracing",
    "training_curves",
    "wait_notices",
    "worker_monitor",
]
