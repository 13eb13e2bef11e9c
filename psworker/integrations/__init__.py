"""Adapters that let training frameworks run on a job's servers.

`transformers` has a Trainer, `lightning` a strategy and `accelerate` an Accelerator. In each, the
job distributes the training data, the servers run the optimizer and clip gradients, and only the
first worker writes checkpoints and logs. Evaluation data is not distributed: every worker evaluates
all of it. Each adapter needs the extra of its name (`pip install 'paramserver[transformers]'`).
"""

from typing import TYPE_CHECKING, Any

from pscommon.core.errors import InvalidRequestError

if TYPE_CHECKING:
    import torch

    from psworker.job import Job


def steps_before(job: "Job", since: int = 0) -> int:
    """Return the number of optimizer steps of a worker before this one joined: 0 in a new job.

    Under sync every update is one step of each worker. Under async and ssp an update is a step
    of one worker, so the job's updates are divided by its workers.

    since: The job's version before the first step that counts.
    """
    updates = max(0, job.first_version - since)
    return updates // (1 if job.policy in ("sync", "allreduce", "local") else max(1, job.workers))


def check_device(job: "Job", device: "torch.device", framework: str) -> None:
    """Raise InvalidRequestError if a framework computes on another device than `job.device`."""
    same_type = device.type == job.device.type
    if not same_type or (device.index or 0) != (job.device.index or 0):
        raise InvalidRequestError(
            f"{framework} computes on {device}, but this worker's device is {job.device}. Try: set "
            f"ACCELERATE_TORCH_DEVICE={job.device} before {framework} is imported, or "
            f"`--device {device.type}`"
        )


def refuse_checkpoint(path: Any) -> None:
    """Raise InvalidRequestError if a framework shall resume from a checkpoint."""
    if path:
        raise InvalidRequestError(
            f"cannot resume from {path}: the servers have weights and optimizer state. "
            "Try: start the servers with `--data-dir DIR`; they resume their newest snapshot"
        )
