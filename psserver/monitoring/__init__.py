"""What operators see of a running job: progress, slow or lost workers, and why a job waits."""

__all__ = ["pass_progress", "training_curves", "wait_notices", "worker_monitor"]
