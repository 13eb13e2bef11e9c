"""What operators see of a running job: progress, slow or lost workers, and why a job waits."""
